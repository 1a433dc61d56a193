"""Classes with their constructor arguments, and the colocation of several classes in a process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from phalanx.declare.classes import RESERVED, registered_methods
from phalanx.errors import DeclarationError

#: Options of ``@ray.remote(...)`` that have the same meaning for a group.
HONOURED_RAY_OPTIONS = frozenset({"num_cpus", "memory", "resources", "runtime_env", "max_concurrency"})
#: Attribute of a class with its default values of these options, which options of the group override.
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
    """A class and the arguments of its constructor, which a group calls on each rank: ``cls(*args, **kwargs)``.

    ``cls`` may be any class: a ``px.Worker``, a plain class, or a class decorated with ``@ray.remote`` (its remote
    options are applied, or refused with a reason).

    Raises:
        DeclarationError: if ``cls`` is not a class, is abstract, or does not accept the arguments; if a remote option
            or a registered method is not allowed in a group.
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
                f"{self.cls.__name__} is abstract and cannot be instantiated; it lacks: {missing}. Pass a class "
                "that implements them"
            )
        _check_arguments(self.cls, args, kwargs)

    def __repr__(self) -> str:
        given = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.cls.__name__}.bind({', '.join(given)})"


def _check_arguments(cls: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that the constructor accepts the arguments, so that the error has the caller's traceback, not a rank's."""
    try:
        signature = inspect.signature(cls)
    except (ValueError, TypeError):  # a class from C, or with an opaque metaclass
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join([*(type(a).__name__ for a in args), *(f"{key}=" for key in kwargs)])
        taken = signature.replace(return_annotation=inspect.Signature.empty)
        raise DeclarationError(f"{cls.__name__}({given}): {error}; expected {cls.__name__}{taken}") from None


#: Types that declare the class of a role, or of a group with a single class.
WorkerClass: TypeAlias = type[Any] | RemoteClass | BoundClass


@dataclass(frozen=True)
class Colocation:
    """Several roles in the same process of each rank, as returned by :func:`colocate`."""

    roles: Mapping[str, BoundClass]

    def __repr__(self) -> str:
        return f"px.colocate({dict(self.roles)!r})"


def colocate(roles: Mapping[str, WorkerClass]) -> Colocation:
    """Put an instance of each of several classes into the same process, on every rank.

    Args:
        roles: classes, or ``Cls.bind(...)``, by role name. Roles are constructed in this order, and find each other
            as ``self.roles["name"]``.

    Returns:
        An argument for ``px.WorkerGroup`` in place of a class. Methods are ``group.<role>.<method>(...)``.

    Raises:
        DeclarationError: if there are no roles, or a role name is not an identifier or hides a group attribute.
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
    """Return ``given`` as a BoundClass; a bare class gets no arguments."""
    return given if isinstance(given, BoundClass) else BoundClass(given)


def unwrap(cls: Any) -> tuple[type, dict[str, Any]]:
    """Return the user's class and its remote options, for a class that may be decorated with ``@ray.remote``."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is None:
        if not isinstance(cls, type):
            raise DeclarationError(
                f"px.WorkerGroup and px.BoundClass take a class, got {cls!r} of type {type(cls).__name__}; "
                "pass the class itself, or Cls.bind(...)"
            )
        return cls, {}
    modified = metadata.modified_class
    set_options = {key: value for key, value in dict(cls._default_options).items() if value is not None}
    options = {key: value for key, value in set_options.items() if (key, value) != ("max_concurrency", 1)}
    _check_ray_options(modified.__name__, options)
    user_class = modified.__bases__[0]  # Ray derives its class from the user's
    return user_class, {key: value for key, value in options.items() if key in HONOURED_RAY_OPTIONS}


def _check_ray_options(class_name: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if (
            key in HONOURED_RAY_OPTIONS
            or value in (0, "DEFAULT")
            or key.startswith("_")
            or key == "enable_task_events"
        ):
            continue
        reason = _REFUSED_RAY_OPTIONS.get(key, "a group has no such option")
        raise DeclarationError(f"@ray.remote({key}={value!r}) on {class_name} cannot be applied: {reason}")
