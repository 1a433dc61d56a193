"""The registered methods of a worker class, inherited ones included."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

from phalanx.declare.register import MARK, MethodSpec
from phalanx.errors import DeclarationError

#: Names that registered methods and roles may not have: the public attributes of WorkerGroup and its views. A test
#: compares the names with the classes.
_RESERVED = (
    "any attach call close closed core epoch execute_all execute_all_async execute_all_sync "
    "execute_rank_zero execute_rank_zero_async execute_rank_zero_sync explain mesh method methods name "
    "options number pool profile rank ranks restart role roles run spawn stack state statistics submit "
    "world_size"
)
RESERVED = frozenset(_RESERVED.split())


@functools.lru_cache(maxsize=1024)
def registered_methods(cls: type) -> Mapping[str, MethodSpec]:
    """Return the registered methods of ``cls`` by name, including inherited methods. Computed once per class.

    A subclass that overrides a registered method keeps the registration, unless it registers its own method.

    Raises:
        DeclarationError: if a registered name would hide an attribute of the group; if a registered function is not a
            plain method (a static or class method, a property); if a generator has ``rerun_on_restart=True``,
            ``blocking=False`` or a parameter ``buffer`` or ``by``.
    """
    methods: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            partial = _mark_of(cls, name, attribute)
            if partial is not None or name in methods:
                _check_name(cls, name)
                methods[name] = _complete(cls, name, partial or methods[name])
    return methods


def _mark_of(cls: type, name: str, attribute: Any) -> MethodSpec | None:
    inner = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
    partial = getattr(inner, MARK, None) if inspect.isfunction(inner) else None
    if partial is not None and not inspect.isfunction(attribute):
        raise DeclarationError(
            f"{cls.__name__}.{name} is registered but is a {type(attribute).__name__}; "
            "only plain methods (def or async def with self) can be called through a group"
        )
    return partial


def _check_name(cls: type, name: str) -> None:
    if name in RESERVED:
        raise DeclarationError(
            f"{cls.__name__}.{name}: a registered method may not be called {name!r}, because it would hide "
            f"the group's own attribute group.{name}; rename it. Names taken: {', '.join(sorted(RESERVED))}"
        )


def _complete(cls: type, name: str, partial: MethodSpec) -> MethodSpec:
    function = getattr(cls, name)
    if not callable(function) or isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod):
        raise DeclarationError(
            f"{cls.__name__}.{name} overrides a registered method with {function!r}, not a method"
        )
    signature = _signature(function)
    streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if streams:
        _check_generator(cls, name, partial, signature)
    return replace(
        partial,
        name=name,
        is_async=inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
        streams=streams,
        signature=signature,
        doc=inspect.getdoc(function),
    )


def _check_generator(cls: type, name: str, partial: MethodSpec, signature: inspect.Signature | None) -> None:
    """Check that the options and parameters of a method that yields fit a generator."""
    where = f"{cls.__name__}.{name} is a generator"
    if partial.rerun_on_restart:
        raise DeclarationError(
            f"{where}, and registered with rerun_on_restart=True: a restart would yield its items again, "
            "without a reader. Move what a new process needs into a method that returns, and register that one with "
            "rerun_on_restart=True"
        )
    if not partial.blocking:
        raise DeclarationError(
            f"{where}, and registered with blocking=False: leave that out, and call group.{name}.stream(...) for its "
            f"items as they come, or group.{name}.submit(...) for a future"
        )
    taken = sorted({"buffer", "by"} & set(signature.parameters if signature else ()))
    if taken:
        raise DeclarationError(
            f"{where} with a parameter {taken[0]!r}, which group.{name}.stream({taken[0]}=...) takes itself: rename it"
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    # Without self. A function without a positional parameter cannot be a bound method, and is refused by its arguments.
    for described in (MethodType(function, object()), function):
        with contextlib.suppress(ValueError, TypeError):
            return inspect.signature(described)
    return None
