"""Options of a group, checked when the group is made, and its policies after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from phalanx.config import Shown, is_number, is_whole, settings, shown_ranks
from phalanx.errors import DeclarationError
from phalanx.group.preemption_notices import PreemptionNotice
from phalanx.session.session import session
from phalanx.topology.mesh import Mesh
from phalanx.wire.value import Value


@dataclass(frozen=True)
class GroupOptions:
    """Options of ``px.WorkerGroup``; see there."""

    name: str | None = None
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    num_cpus: float | None = None
    memory: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    start_timeout: float = 300.0
    call_timeout: float | None = None
    stall_report_after: float | None = None
    on_failure: RestartPolicy | ReplacePolicy | None = None
    max_concurrency: int | None = None
    visible_devices: Literal["own", "node"] = "own"
    detached: bool = False
    show_ranks: Shown = (0,)
    on_notice: Callable[[PreemptionNotice], object] | None = None

    def extras(self) -> dict[str, float]:
        """Return the resources that are reserved for each rank on its node, in addition to its slot."""
        found = {"CPU": self.num_cpus, "memory": self.memory, **self.resources}
        return {name: float(amount) for name, amount in found.items() if amount}

    def with_ray_options(self, given: Mapping[str, Any]) -> GroupOptions:
        """Return these options, completed by those of ``@ray.remote(...)`` on the class; options of the group win."""
        changes = {name: value for name, value in given.items() if getattr(self, name) in (None, {}, ())}
        return replace(self, **changes)


def checked_options(mesh: Value, world_size: int, given: Mapping[str, Any]) -> GroupOptions:
    """Check options, and return them with meshes resolved to the group's size.

    Raises:
        DeclarationError: if an option has a wrong type or value, or a mesh does not fit the group's size.
    """
    values = {key: value for key, value in given.items() if value is not None}
    values |= {key: int(value) for key, value in values.items() if is_whole(value)}  # Ray refuses numpy's
    values.setdefault("start_timeout", settings().start_timeout)
    if settings().call_timeout is not None:
        values.setdefault("call_timeout", settings().call_timeout)
    _check("WorkerGroup", values)
    values["show_ranks"] = shown_ranks(values.get("show_ranks", session.show_ranks))
    if values.get("detached") and "name" not in values:
        raise DeclarationError(
            "WorkerGroup(detached=True) needs name=..., under which px.attach(name) finds it again"
        )
    # float("inf") is allowed: no limit
    values["start_timeout"] = min(float(values["start_timeout"]), threading.TIMEOUT_MAX)
    return GroupOptions(meshes=_meshes(mesh, world_size), **values)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0  # not nan


#: Options of groups and policies, each with a check of its value, and the expected value as text.
_EXPECTED: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("start_timeout", "call_timeout", "stall_report_after"), _is_positive, "seconds as a positive number"),
    (
        ("num_cpus", "memory"),
        lambda value: is_number(value) and value >= 0,
        "a number, 0 or more (memory in bytes)",
    ),
    (("max_concurrency",), lambda value: is_whole(value, 1), "a whole number from 1"),
    (
        ("name",),
        lambda value: isinstance(value, str) and bool(value),
        "a text that is not empty, or leave it out",
    ),
    (
        ("on_failure",),
        lambda value: isinstance(value, RestartPolicy | ReplacePolicy),
        "px.RestartPolicy(max_restarts=..., window_s=...), or px.ReplacePolicy(max_failures=..., window_s=...)",
    ),
    (("on_notice",), callable, "a function that takes a px.PreemptionNotice"),
    (("env", "resources", "runtime_env"), lambda value: isinstance(value, Mapping), "a dict"),
    (
        ("visible_devices",),
        lambda value: value in ("own", "node"),
        "'own' (each rank sees its own devices) or 'node' (each sees all of the group's devices on its node)",
    ),
    (("max_restarts", "max_failures"), lambda value: is_whole(value, 0), "a whole number, 0 or more"),
    (("window_s",), _is_positive, "seconds, more than 0"),
)


def _check(owner: str, values: Mapping[str, Any]) -> None:
    """Check the options of ``owner``.

    Raises:
        DeclarationError: if an option has a wrong type or value.
    """
    for names, fits, expected in _EXPECTED:
        for name in names:
            if name in values and not fits(values[name]):
                raise DeclarationError(f"{owner}({name}={values[name]!r}): expected {expected}")


def _meshes(given: Value, world_size: int) -> dict[str, Mesh]:
    if given is None:
        return {}
    named = {"default": given} if isinstance(given, Mesh) else given
    if not isinstance(named, Mapping) or not all(isinstance(mesh, Mesh) for mesh in named.values()):
        raise DeclarationError(
            f"WorkerGroup(mesh={given!r}): expected px.Mesh(dp=..., tp=...), or a dict of name to px.Mesh"
        )
    return {str(name): mesh.resolve(world_size) for name, mesh in named.items()}


class _Policy:
    """Base class of policies: a group is recovered a limited number of times within a window of time."""

    window_s: float

    def __post_init__(self) -> None:
        _check(f"px.{type(self).__name__}", vars(self))

    def recent(self, recoveries: Sequence[float], now: float) -> list[float]:
        """Return the times of recoveries, in seconds, that count at ``now``."""
        return [at for at in recoveries if now - at < self.window_s]


@dataclass(frozen=True)
class RestartPolicy(_Policy):
    """Restart of a broken group: ``WorkerGroup(..., on_failure=px.RestartPolicy(max_restarts=2, window_s=600))``.

    The call in which the group broke raises its error, as always; the next call on the group restarts it first, and
    then runs in the new epoch. After ``max_restarts`` restarts within the last ``window_s`` seconds, the group stays
    broken: restarts do not repair a failure that happens each time.

    Raises:
        DeclarationError: if ``max_restarts`` is not a whole number from 0, or ``window_s`` not positive.
    """

    max_restarts: int = 2
    window_s: float = 600.0


@dataclass(frozen=True)
class ReplacePolicy(_Policy):
    """Replacement of lost ranks: ``WorkerGroup(..., on_failure=px.ReplacePolicy(max_failures=2, window_s=600))``.

    Like :class:`RestartPolicy`, but only the lost ranks get new processes, by ``px.replace_ranks``: all ranks return to
    the last ``px.snapshot``. The group is restarted instead if there is no snapshot, no copy of a lost state, or no
    capacity. A caller that repeats the failed call repeats it from the state of the snapshot.

    Args:
        max_failures: number of recoveries within ``window_s`` seconds, after which the group stays broken. Losses that
            ``px.preemption_notices`` announced do not count.

    Raises:
        DeclarationError: if ``max_failures`` is not a whole number from 0, or ``window_s`` not positive.
    """

    max_failures: int = 2
    window_s: float = 600.0
