"""A class together with its constructor arguments, and the colocation of several classes in a process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from phalanx.declare.classes import RESERVED, registered_methods
from phalanx.errors import DeclarationError

#: Options of ``@ray.remote(...)`` that mean the same on a group.
HONOURED_RAY_OPTIONS = frozenset({"num_cpus", "memory", "resources", "runtime_env", "max_concurrency"})
#: Where a class says itself with which of these options a group makes it, if the group does not say others.
OWN_OPTIONS = "__phalanx_options__"
_REFUSED_RAY_OPTIONS = {
    "num_gpus": "the pool decides: accelerators_per_slot= and max_colocate_count= of px.ResourcePool",
    "accelerator_type": "say it on the pool: px.ResourcePool(..., accelerator_type=...)",
    "max_restarts": "a restarted rank has lost its state and its peers' communicators; use group.restart()",
    "max_task_retries": "a call that ran twice on one rank would leave the ranks with different state",
    "name": "give the group a name: px.WorkerGroup(..., name=..., detached=True)",
    "lifetime": "use px.WorkerGroup(..., detached=True, name=...)",
    "concurrency_groups": "use px.WorkerGroup(..., max_concurrency=n)",
    "scheduling_strategy": "the pool decides where a rank runs",
    "placement_group": "the pool decides where a rank runs",
}


class RemoteClass(Protocol):
    """A class decorated with ``@ray.remote``."""

    @property
    def options(self) -> Callable[..., object]: ...


class BoundClass:
    """Class and arguments that a group constructs on each rank: ``cls(*args, **kwargs)``.

    ``cls`` may be any class: a ``px.Worker``, a plain class, or a class decorated with ``@ray.remote`` (its remote
    options are honored, or refused with a reason).

    Raises:
        DeclarationError: ``cls`` is no class, or an abstract class, or does not take these arguments, or a group cannot
            offer its registered methods.
    """

    def __init__(self, cls: type[Any] | RemoteClass, *args: Any, **kwargs: Any) -> None:
        self.cls, options = unwrap(cls)
        self.ray_options = {**getattr(self.cls, OWN_OPTIONS, {}), **options}
        self.args = args
        self.kwargs = kwargs
        self.methods = registered_methods(self.cls)
        if inspect.isabstract(self.cls):
            missing = ", ".join(sorted(self.cls.__abstractmethods__))
            raise DeclarationError(
                f"{self.cls.__name__} is abstract, so that no rank could make one; it lacks: {missing}. Pass a class "
                "that implements them"
            )
        _check_arguments(self.cls, args, kwargs)

    def __repr__(self) -> str:
        given = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.cls.__name__}.bind({', '.join(given)})"


def _check_arguments(cls: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """See to it that the constructor takes these arguments: here is the line that gave them, on a rank it is not."""
    try:
        signature = inspect.signature(cls)
    except (ValueError, TypeError):  # made in C, or by a metaclass that tells nothing
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(a).__name__ for a in args), *(f"{key}=" for key in kwargs)])
        taken = signature.replace(return_annotation=inspect.Signature.empty)
        raise DeclarationError(f"{cls.__name__}({given}): {error}; expected {cls.__name__}{taken}") from None


#: Classes that a role, or a group of a single class, is made of.
WorkerClass: TypeAlias = type[Any] | RemoteClass | BoundClass


@dataclass(frozen=True)
class Colocation:
    """Several roles in the same process, on each rank; made by :func:`colocate`."""

    roles: Mapping[str, BoundClass] = field(default_factory=dict[str, BoundClass])

    def __repr__(self) -> str:
        return f"px.colocate({dict(self.roles)!r})"


def colocate(roles: Mapping[str, WorkerClass]) -> Colocation:
    """Put several classes into the same process, on each rank.

    Args:
        roles: role name to class, or to ``Cls.bind(...)``. Roles are made in this order; each sees the others
            as ``self.roles["name"]``.

    Returns:
        An argument for ``px.WorkerGroup`` in place of a class; the group then has ``group.<role>.<method>(...)``.

    Raises:
        DeclarationError: no role at all, or a role name that is no identifier or hides a group attribute.
    """
    if not isinstance(roles, Mapping) or not roles:
        raise DeclarationError(
            f'px.colocate({roles!r}): expected a dict of role name to class, {{"actor": Actor}}'
        )
    for role in roles:
        if not isinstance(role, str) or not role.isidentifier() or role.startswith("_") or role in RESERVED:
            raise DeclarationError(
                f"px.colocate: {role!r} cannot be a role name; expected an identifier that does not start with "
                f"an underscore and is none of: {', '.join(sorted(RESERVED))}"
            )
    return Colocation({role: _bound(given) for role, given in roles.items()})


def roles_of(given: WorkerClass | Colocation) -> dict[str, BoundClass]:
    """Return the classes of a group by role; a single class has the role ""."""
    return dict(given.roles) if isinstance(given, Colocation) else {"": _bound(given)}


def _bound(given: WorkerClass) -> BoundClass:
    """Return ``given`` as class with arguments; a bare class has none."""
    return given if isinstance(given, BoundClass) else BoundClass(given)


def unwrap(cls: Any) -> tuple[type, dict[str, Any]]:
    """The user's class and its remote options, for a class that may be decorated with ``@ray.remote``."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        if not isinstance(cls, type):
            raise DeclarationError(
                f"px.WorkerGroup and px.BoundClass take a class, got {cls!r} of type {type(cls).__name__}; "
                "pass the class itself, or Cls.bind(...)"
            )
        return cls, {}
    modified = metadata.modified_class
    options = {key: value for key, value in dict(cls._default_options).items() if value is not None}
    _check_ray_options(modified.__name__, options)
    user_class = modified.__bases__[0]  # Ray derives its class from the user's
    return user_class, {key: value for key, value in options.items() if key in HONOURED_RAY_OPTIONS}


def _check_ray_options(class_name: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        harmless = value in (0, "DEFAULT") or (key == "max_concurrency" and value == 1)
        if key in HONOURED_RAY_OPTIONS or harmless or key.startswith("_") or key == "enable_task_events":
            continue
        reason = _REFUSED_RAY_OPTIONS.get(key, "a group has no such option")
        raise DeclarationError(f"@ray.remote({key}={value!r}) on {class_name} cannot be honoured: {reason}")
