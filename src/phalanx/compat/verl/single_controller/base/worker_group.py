"""Pools, bound classes and groups without a backend: the names of ``verl.single_controller.base.worker_group``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.compat.verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    _check_dispatch_mode,
    get_predefined_dispatch_fn,
    registered_methods,
)
from phalanx.errors import DeclarationError
from phalanx.wire.value import checked_number


class UnusableValue(DeclarationError, ValueError):
    """A name of a method, a variable for ranks or a request for accelerators that a group cannot use."""


class ResourcePool:
    """Numbers of processes by node: ``ResourcePool([8, 8])`` is two nodes of 8."""

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        self._store = [] if process_on_nodes is None else process_on_nodes
        self.max_colocate_count = checked_number("ResourcePool: max_colocate_count", max_colocate_count, 1)
        self.n_gpus_per_node = n_gpus_per_node

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        """Processes by node."""
        return self._store


class ClassWithInitArgs:
    """A class and its constructor arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False


class WorkerGroup:
    """Base class of groups: the workers, and registered methods as attributes."""

    def __init__(self) -> None:
        self.fused_worker_used = False
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._master_addr: str | None = None
        self._master_port: str | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._workers)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Callable[..., Any]) -> None:
        """Add every registered method of a class as an attribute of this group.

        Args:
            func_generator: ``f(group, method_name, dispatch_fn=, collect_fn=, execute_fn=, blocking=)``.

        Raises:
            CheckFailed: if a method's dispatch mode lacks a function.
            UnusableValue: if a method has the name of a property of groups.
        """
        for name, _, modes in registered_methods(user_defined_cls):
            bound = self._bound(name, modes, func_generator)
            try:
                setattr(self, name, bound)
            except AttributeError as error:
                raise UnusableValue(
                    f"Fail to set method_name {name} of {user_defined_cls.__name__}: groups have a property of that "
                    "name; rename the method"
                ) from error

    def _bound(self, name: str, registered: Any, func_generator: Callable[..., Any]) -> Any:
        mode = registered["dispatch_mode"]
        functions = mode if isinstance(mode, dict) else get_predefined_dispatch_fn(mode)
        _check_dispatch_mode(functions)
        on_zero = mode is Dispatch.RANK_ZERO or registered["execute_mode"] is Execute.RANK_ZERO
        return func_generator(
            self,
            name,
            dispatch_fn=functions["dispatch_fn"],
            collect_fn=functions["collect_fn"],
            execute_fn=getattr(self, "execute_rank_zero" if on_zero else "execute_all"),
            blocking=registered["blocking"],
        )
