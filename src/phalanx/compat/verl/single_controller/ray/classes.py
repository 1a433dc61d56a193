"""Classes with their arguments and Ray options, and classes of several roles that share one process per rank."""

from __future__ import annotations

import inspect
from typing import Any

import ray

from phalanx.compat.verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    CheckFailed,
    Dispatch,
    registered_methods,
)
from phalanx.compat.verl.single_controller.base.worker import MegatronWorker, Worker
from phalanx.compat.verl.single_controller.base.worker_group import ClassWithInitArgs, UnusableValue
from phalanx.errors import DeclarationError
from phalanx.topology.environment import variables_set

FusedWorkerCLSName = "FusedWorker"
_SEPARATOR = "_fwmn_"


class NoSharedBase(DeclarationError, ValueError, AssertionError):
    """Roles of one process that do not all derive from ``Worker``."""


def _unwrap_ray_remote(cls: Any) -> Any:
    """Return the user's class, without ``@ray.remote``."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class.__bases__[0]


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class, usually decorated with ``@ray.remote``, with constructor arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, float] = {}

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Set custom resources that each rank takes besides its slot."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Update the ranks' Ray options, as in ``Class.options(...)``. A ``runtime_env`` is merged."""
        merged = merge_runtime_env(self._options.get("runtime_env"), options.get("runtime_env"))
        self._options.update(options, runtime_env=merged)

    def ray_options(self) -> dict[str, Any]:
        """Return the options of ``@ray.remote``, overridden by the options of ``update_options``."""
        declared = {
            k: v for k, v in (getattr(self.cls, "_default_options", None) or {}).items() if v is not None
        }
        runtime_env = merge_runtime_env(declared.get("runtime_env"), self._options.get("runtime_env"))
        given = {**declared, **self._options, "runtime_env": runtime_env}
        if self._additional_resource:
            given["resources"] = {**(given.get("resources") or {}), **self._additional_resource}
        return given


def merge_runtime_env(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    """Merge two runtime environments. The second overrides the first, variable by variable."""
    merged = {**(first or {}), **(second or {})}
    variables = {**(first or {}).get("env_vars", {}), **(second or {}).get("env_vars", {})}
    return {**merged, "env_vars": variables} if variables else merged


def _determine_fsdp_megatron_base_class(mros: list[Any]) -> type:
    """Return the base class of all roles: ``MegatronWorker`` if all derive from it, else ``Worker``.

    Raises:
        NoSharedBase: if a role does not derive from ``Worker``.
    """
    for base in (MegatronWorker, Worker):
        if all(base in mro for mro in mros):
            return base
    others = [mro[0] for mro in mros if Worker not in mro]
    raise NoSharedBase(
        f"Cannot determine base class for {mros}: worker_cls {others[0]} should be a subclass of Worker. Only classes "
        f"that derive from Worker share a process in this way, and {[cls.__name__ for cls in others]} do not"
    )


def _classes(class_dict: dict[str, RayClassWithInitArgs]) -> tuple[dict[str, type], dict[str, Any], type]:
    """Return the classes of roles, their arguments as of ``_made``, and the base class of all. Raises as they do."""
    if not class_dict:
        raise CheckFailed("no roles: expected a dict of role name to RayClassWithInitArgs")
    classes = {role: _unwrap_ray_remote(given.cls) for role, given in class_dict.items()}
    arguments = {role: (given.args, given.kwargs) for role, given in class_dict.items()}
    return classes, arguments, _determine_fsdp_megatron_base_class([cls.__mro__ for cls in classes.values()])


def _made(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with variables_set({"DISABLE_WORKER_INIT": "1"}):  # as verl sets it, for constructors that read it
        return cls(*args, **kwargs)


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Return a class whose instances hold one worker of each role, with methods ``{role}_{method}``.

    ``RayWorkerGroup(pool, cls).spawn(roles)`` returns a group for each role.
    """
    classes, arguments, base = _classes(class_dict)

    class WorkerDict(base):
        role_methods: dict[str, dict[str, str]]

        def __init__(self) -> None:
            super().__init__()
            self.worker_dict = {role: _made(cls, *arguments[role]) for role, cls in classes.items()}

    WorkerDict.role_methods = {
        role: _bind_workers_method_to_parent(WorkerDict, role, cls) for role, cls in classes.items()
    }
    WorkerDict.__qualname__ = "WorkerDict"
    return RayClassWithInitArgs(cls=ray.remote(WorkerDict))


def _bind_workers_method_to_parent(cls: type, key: str, user_defined_cls: type) -> dict[str, str]:
    """Add a role's registered methods to ``cls``, as ``{role}_{method}``. Return the new names by method.

    Raises:
        UnusableValue: if the name of a method for rollout clients is taken.
    """
    bound: dict[str, str] = {}
    for name, method, registered in registered_methods(user_defined_cls):
        alias = f"{key}_{name}"
        setattr(cls, alias, _forward(key, name, alias, registered, inspect.iscoroutinefunction(method)))
        bound[name] = alias
        if registered["dispatch_mode"] is Dispatch.DIRECT_ROLLOUT_METHOD and "rollout" in key:
            if hasattr(cls, name):
                raise UnusableValue(
                    f"Fail to set method_name {name}: conflict direct rollout method {name} with role {key}; rollout "
                    "clients call it by its own name, which another role or the base class has, too: rename one"
                )
            setattr(cls, name, getattr(cls, alias))  # rollout clients call it by its own name
    return bound


def _forward(role: str, name: str, alias: str, registered: dict[str, Any], is_async: bool) -> Any:
    if is_async:

        async def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.worker_dict[role], name)(*args, **kwargs)
    else:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.worker_dict[role], name)(*args, **kwargs)

    forward.__name__ = alias
    forward.__qualname__ = f"WorkerDict.{alias}"
    setattr(forward, MAGIC_ATTR, registered)
    return forward


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type:
    """Return a plain class, to derive from, with one worker of each role as attributes named by role."""
    classes, arguments, base = _classes(class_dict)

    class FusedWorker(base):
        is_fused_worker = True
        raw_cls_dict = classes

        def __init__(self) -> None:
            super().__init__()
            for role, cls in classes.items():
                worker = _made(cls, *arguments[role])
                setattr(self, role, worker)
                self.fused_worker_dict[role] = worker
            for worker in self.fused_worker_dict.values():
                worker.fused_worker_dict = self.fused_worker_dict

        def _fuw_execute(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
            role, found, name = method_name.partition(_SEPARATOR)
            if not found or role not in self.fused_worker_dict:
                raise AssertionError(
                    f"calling {role}'s {name}, but {role} not in fused_worker_dict: {method_name!r} must be "
                    f"'<role>{_SEPARATOR}<method>' with a role of {sorted(self.fused_worker_dict)}"
                )
            return getattr(self.fused_worker_dict[role], name)(*args, **kwargs)

    FusedWorker.__name__ = FusedWorker.__qualname__ = f"{FusedWorkerCLSName}_{'_'.join(classes)}"
    return FusedWorker


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Return the class of ``create_colocated_worker_raw_cls`` for a group. Roles share ``fused_worker_dict``."""
    bound = RayClassWithInitArgs(cls=ray.remote(create_colocated_worker_raw_cls(class_dict)))
    bound.fused_worker_used = True
    return bound
