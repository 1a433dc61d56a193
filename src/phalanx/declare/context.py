"""Context of a worker, and the context of the rank that the current code runs on."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import DeclarationError
from phalanx.topology.mesh import Mesh
from phalanx.wire.messages import RankConfig


class Siblings(dict[str, Any]):
    """The roles in this process by name, filled while they are constructed, in the declared order."""

    def __missing__(self, role: str) -> Any:
        raise KeyError(
            f"no role {role!r} in this process yet; here are: {sorted(self)}. Roles are made in the "
            "order given to px.colocate, so a constructor sees only the ones before it"
        )

    def __getattr__(self, role: str) -> Any:
        if role.startswith("_"):
            raise AttributeError(role)
        try:
            return self[role]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None


@dataclass
class WorkerContext(RankConfig):
    """Identity of a worker: its place in the group, and the state that it shares with other roles of its process.

    Attributes:
        registered: coordinates in the meshes that workers registered, or functions that return the meshes, by name.
        in_driver: True if calls run one after another in the driver's own process.
        tell: sets the rank's status line in `phalanx top`; None: the platform has no call page.
        measure: reports (subject, rank as text, values by name) to the cluster's own monitoring.
        shared: state that the library keeps for all roles of the rank.
    """

    role: str = ""
    registered: dict[str, Any] = field(default_factory=dict)
    roles: Siblings = field(default_factory=Siblings)
    in_driver: bool = False
    tell: Callable[[str], None] | None = None
    measure: Callable[[str, str, Mapping[str, float]], None] | None = None
    shared: dict[str, Any] = field(default_factory=dict)

    def places(self) -> dict[str, dict[str, Any]]:
        """Return this rank's coordinates in each registered mesh that exists by now."""
        found = {name: mesh() if callable(mesh) else mesh for name, mesh in self.registered.items()}
        return {name: coordinates_of(mesh, self.rank) for name, mesh in found.items() if mesh is not None}


#: Context of the worker that is being constructed, for constructors that read their rank.
being_made: ContextVar[WorkerContext | None] = ContextVar("phalanx_worker_being_made", default=None)


_others: dict[int, tuple[weakref.ref[Any], WorkerContext]] = {}
_of_process: list[WorkerContext] = []
_present: ContextVar[WorkerContext | None] = ContextVar("phalanx_present_worker", default=None)


def note_context(worker: object, context: WorkerContext) -> None:
    """Store the context of a worker whose class is not a ``px.Worker``."""
    key, others = id(worker), _others  # globals may be gone when the callback runs at interpreter exit
    with contextlib.suppress(TypeError):  # objects without weak references are not remembered
        others[key] = weakref.ref(worker, lambda _: others.pop(key, None)), context


def context_of(worker: object) -> WorkerContext:
    """Return the context of a worker, also for other classes than ``px.Worker`` and during the constructor."""
    context = getattr(worker, "_context", None)
    if isinstance(context, WorkerContext):
        return context
    known = _others.get(id(worker))
    if known is not None and known[0]() is worker:
        return known[1]
    context = current_context()  # the fallback for objects without weak references
    if context is None:
        context = WorkerContext()
        note_context(worker, context)
    return context


def set_context_of_process(context: WorkerContext) -> None:
    """Set the context of this process, which runs a single rank."""
    _of_process[:] = [context]


def present(context: WorkerContext) -> contextlib.ExitStack:
    """Let this thread run code of a rank, for processes with several ranks, until the returned stack is closed."""
    stack = contextlib.ExitStack()  # a generator would set the traceback of errors, which frozen ones refuse
    stack.callback(_present.reset, _present.set(context))
    return stack


def current_context() -> WorkerContext | None:
    """Return the context of the rank that runs this code, or None outside of ranks."""
    return being_made.get() or _present.get() or next(iter(_of_process), None)


def runs_inline() -> bool:
    """Return whether this code runs on a rank in the driver's process."""
    context = being_made.get() or _present.get()
    return context is not None and context.in_driver


def coordinates_of(mesh: Any, rank: int) -> dict[str, Any]:
    """Return the rank's coordinates by axis in a px.Mesh, a torch DeviceMesh, or a dict of coordinates."""
    if isinstance(mesh, Mesh):
        return dict(mesh.coordinates(rank))
    if isinstance(mesh, Mapping):
        return {str(axis): int(place) for axis, place in mesh.items()}
    axes, place = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "get_coordinate", None)
    coordinate = place() if callable(place) else None
    if axes and coordinate is not None:
        return dict(zip(axes, (int(c) for c in coordinate), strict=True))  # type: ignore[union-attr]
    raise DeclarationError(
        f"register_mesh: got {type(mesh).__name__}; expected a px.Mesh, a dict of coordinates such as "
        '{"dp": 0, "tp": 1}, or a torch DeviceMesh made with mesh_dim_names=(...) that contains this rank'
    )
