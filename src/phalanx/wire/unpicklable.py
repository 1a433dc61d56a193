"""Error message for a value that cannot be pickled, with the path to the part at fault."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any

from phalanx.wire.value import Value

_MOST_MET = 64
_NOT_SENT = ("__dict__", "__weakref__", "_abc_impl")
"""Attributes of classes that cloudpickle leaves out."""

Try = Callable[[Any], None]


def explain_unpicklable(value: Value, error: BaseException, attempt: Try) -> str:
    """Return the message for ``error``, which pickling ``value`` raised; ``attempt(part)`` pickles a part or raises."""
    path, part = _search(value, "", attempt, {id(value)}) or ("", value)
    kind = f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins.")
    return (
        f"{path or 'the value'} cannot be sent: an object of type {kind} cannot be pickled "
        f"({type(error).__name__}: {error}). Expected something that cloudpickle takes: leave it out, "
        'create it on the rank, or keep a result there (collect="none")'
    )


def _search(part: Value, path: str, attempt: Try, met: set[int]) -> tuple[str, Any] | None:
    """Return the path and the innermost part that fails, such as ``args[0]['lock']`` for the arguments of a call.

    Return None if ``part`` fails only through parts that were ``met`` before, such as a method through its class.
    """
    if not path and _is_call(part):
        named = itertools.chain(_parts(part[0], "args"), _parts(part[1], "kwargs"))
    else:
        named = _parts(part, path)
    is_innermost = True
    for name, each in named if len(met) < _MOST_MET else ():
        if id(each) in met:
            is_innermost = False
        elif _fails(each, attempt):
            met.add(id(each))
            found = _search(each, name, attempt, met)
            if found is not None:
                return found
            is_innermost = False
    return (path, part) if is_innermost else None


def _fails(part: Value, attempt: Try) -> bool:
    try:
        attempt(part)
    except Exception:
        return True
    return False


def _is_call(value: Value) -> bool:
    """Return whether a value has the form of a call's arguments, ``(args, kwargs)``."""
    return type(value) is tuple and [*map(type, value)] == [tuple, dict]


def _parts(value: Value, path: str) -> Iterator[tuple[str, Any]]:
    base = path or "value"
    if isinstance(value, dict):
        yield from ((f"{base}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{base}[{index}]", item) for index, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f"{base}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))
    elif isinstance(value, FunctionType):
        yield from ((f"{base} (uses {name!r})", item) for name, item in _used_by(value))
    elif isinstance(value, type):
        own = ((name, item) for name, item in vars(value).items() if name not in _NOT_SENT)
        yield from ((f"{base} (class {value.__name__}).{name}", item) for name, item in own)
    elif type(getattr(value, "__dict__", None)) is dict:
        yield from ((f"{base}.{name}", item) for name, item in vars(value).items())


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values that cloudpickle sends with a function, by name: captured variables, globals, defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # the variable is not bound yet
            yield name, cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
