"""Exceptions as bytes for any process, and back without running the code of their class.

Default pickling of an exception calls its class again with `args`: it fails for every class whose `__init__` takes
other arguments, loses `OSError.filename`, and loses the exception if any attribute cannot be pickled. Here class,
arguments and attributes, also of C classes, are pickled separately; a note names the attributes that cannot be pickled.
The bytes hold plain data only: unpickling them needs no class of the user's.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import cloudpickle

from phalanx.errors import PhalanxError
from phalanx.wire.value import Value

if sys.version_info < (3, 11):
    import exceptiongroup  # pyright: ignore[reportMissingImports]

    _GROUP: Any = exceptiongroup.BaseExceptionGroup
else:
    import builtins

    _GROUP = builtins.BaseExceptionGroup

ITEM_LIMIT = 1 << 20
"""An argument or attribute that pickles to more bytes than this is left behind."""
TOTAL_LIMIT = 16 << 20
"""An exception that packs to more bytes than this is not sent as an object, only as text."""
_DEPTH = 8
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not in C
# Live objects of the raising process, or restored by the constructor.
_SKIPPED_MEMBERS = {"args", "obj", "exceptions", "message"}
_SKIPPED_STATE = {"_message", "_exceptions"}  # of the exceptiongroup backport
_MEMBER = (MemberDescriptorType, GetSetDescriptorType)
_MISSING = object()


@dataclass(frozen=True)
class _Item:
    """A pickled value; `data` is None if it could not be pickled."""

    name: str
    type_name: str
    data: bytes | None


@dataclass(frozen=True)
class _Packed:
    module: str
    qualname: str
    by_value: bytes | None
    args: tuple[_Item, ...] = ()
    attributes: tuple[_Item, ...] = ()
    children: tuple[_Packed, ...] | None = None
    cause: _Packed | None = None
    whole: bytes | None = None
    text: str = ""


@dataclass(frozen=True)
class Parts:
    """An unpacked exception before it becomes an instance of a class."""

    cls: type[BaseException]
    args: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    cause: BaseException | None = None
    whole: PhalanxError | None = None


def type_name_of(cls: type) -> str:
    """Return the name as in a traceback: with the module, unless that is builtins or __main__."""
    module = str(getattr(cls, "__module__", "builtins"))
    qualname = str(getattr(cls, "__qualname__", cls.__name__))
    return qualname if module in ("builtins", "__main__") else f"{module}.{qualname}"


def text_of(exc: BaseException) -> str:
    """Return `str(exc)`, also of an exception whose `__str__` raises."""
    try:
        return str(exc)
    except Exception as error:
        return f"<str() of this {type(exc).__name__} raised {type(error).__name__}>"


def encodable(text: str) -> str:
    """Return the text with escapes for characters outside of UTF-8, such as a lone surrogate of a file name."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def pack(exc: BaseException) -> bytes | None:
    """Return the exception as bytes, or None if it is too large or cannot be packed."""
    try:
        data = pickle.dumps(_pack(exc, 0), protocol=5)
    except Exception:
        return None
    return data if len(data) <= TOTAL_LIMIT else None


def unpack(data: bytes | None) -> BaseException | None:
    """Return the exception that `pack` was given, or None if this process does not have its class."""
    parts = load_parts(data)
    try:
        return None if parts is None else parts.whole or assemble(parts.cls, parts)
    except Exception:
        return None


def load_parts(data: bytes | None) -> Parts | None:
    """Return the parts for `assemble`, or None if this process does not have the class."""
    try:
        return None if data is None else _load(pickle.loads(data))
    except Exception:
        return None


def assemble(cls: type[BaseException], parts: Parts) -> BaseException:
    """Return an instance of `cls`, which is `parts.cls` or derives from it, without any Python `__init__`.

    Raises:
        Exception: of the C constructor, if it does not take the arguments.
    """
    native: Any = (
        cls  # the C type that decides the layout, such as OSError: the only one whose `__new__` is safe
    )
    while native.__flags__ & _HEAP_TYPE and native.__base__ is not None:
        native = native.__base__
    exc: BaseException = native.__new__(cls, *parts.args)
    # A class may keep other arguments than its base takes: they are restored below, as attributes.
    with contextlib.suppress(Exception):
        native.__init__(exc, *parts.args)
    object.__setattr__(exc, "args", parts.args)
    for name, value in parts.attributes.items():
        found = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        member = next((item for item in found if isinstance(item, _MEMBER)), None)
        if member is None:
            exc.__dict__[name] = value
        else:
            # Read-only members were set by the C constructor.
            with contextlib.suppress(AttributeError, TypeError):
                member.__set__(exc, value)
    if parts.cause is not None:
        object.__setattr__(exc, "__cause__", parts.cause)
    return exc


def _pack(exc: BaseException, depth: int) -> _Packed:
    cls = type(exc)
    module, text = str(cls.__module__), text_of(exc)[:10_000]
    if isinstance(exc, PhalanxError):
        return _Packed(module, cls.__qualname__, None, text=text, whole=pickle.dumps(exc, protocol=5))
    children = None
    args = exc.args
    if isinstance(exc, _GROUP) and depth < _DEPTH:
        group: Any = exc
        children = tuple(_pack(child, depth + 1) for child in group.exceptions)
        args = (group.message,)
    cause = exc.__cause__
    return _Packed(
        module,
        cls.__qualname__,
        _dumps(cls),
        args=tuple(_item(f"args[{i}]", value) for i, value in enumerate(args)),
        attributes=tuple(_item(name, value) for name, value in _attributes(exc)),
        children=children,
        cause=_pack(cause, depth + 1) if cause is not None and depth < _DEPTH else None,
        text=text,
    )


def _item(name: str, value: Value) -> _Item:
    data = _dumps(value)
    return _Item(name, type_name_of(type(value)), None if data is None or len(data) > ITEM_LIMIT else data)


def _dumps(value: Value) -> bytes | None:
    # The objects are the user's: their __reduce__ and __getstate__ may raise anything.
    try:
        return cloudpickle.dumps(value, protocol=5)
    except Exception:
        return None


def _attributes(exc: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the items of `__dict__`, members of C exceptions (`OSError.filename`) and slots."""
    for cls in type(exc).__mro__:
        native = not cls.__flags__ & _HEAP_TYPE
        for name, member in vars(cls).items():
            skipped = name.startswith("__") or (native and name in _SKIPPED_MEMBERS)
            if isinstance(member, _MEMBER) and not skipped:
                with contextlib.suppress(Exception):
                    value = member.__get__(exc, type(exc))
                    if value is not None:
                        yield name, value
    yield from ((name, value) for name, value in vars(exc).items() if name not in _SKIPPED_STATE)


def _load(packed: _Packed) -> Parts | None:
    if packed.whole is not None:
        error = pickle.loads(packed.whole)
        return Parts(type(error), whole=error)
    cls = _find_class(packed)
    if cls is None:
        return None
    lost: list[str] = []
    args = tuple(_loads(item, lost, f"<{item.type_name} that could not be sent>") for item in packed.args)
    if packed.children is not None:
        args = (*args, [_child(child) for child in packed.children])
    attributes = {item.name: _loads(item, lost, _MISSING) for item in packed.attributes}
    attributes = {name: value for name, value in attributes.items() if value is not _MISSING}
    if lost:
        note = f"not sent with this exception, since it is too large or cannot be pickled: {', '.join(lost)}"
        attributes["__notes__"] = [*attributes.get("__notes__", ()), note]
    if packed.children is not None and sys.version_info < (3, 11):
        attributes.update(_message=args[0], _exceptions=tuple(args[1]))
    return Parts(cls, args, attributes, None if packed.cause is None else _child(packed.cause))


def _child(packed: _Packed) -> BaseException:
    """Return a part of a group or a chain; a stand-in with its text if this process does not have its class."""
    parts = _load(packed)
    if parts is None:
        return PhalanxError(f"{packed.module}.{packed.qualname}: {packed.text}")
    return parts.whole or assemble(parts.cls, parts)


def _loads(item: _Item, lost: list[str], default: Value) -> Value:
    if item.data is not None:
        try:
            return pickle.loads(item.data)
        except Exception:
            # Its class is not importable here, or refuses to be rebuilt: as if it was never sent.
            pass
    lost.append(f"{item.name} ({item.type_name})")
    return default


def _find_class(packed: _Packed) -> type[BaseException] | None:
    """Return the class, by its name first: a class of the driver's `__main__` by value would be another class."""
    with contextlib.suppress(Exception):
        named: Any = sys.modules.get(packed.module) or importlib.import_module(packed.module)
        for name in packed.qualname.split("."):
            named = getattr(named, name)
        if isinstance(named, type) and issubclass(named, BaseException):
            return named
    with contextlib.suppress(Exception):
        by_value: Any = None if packed.by_value is None else pickle.loads(packed.by_value)
        if isinstance(by_value, type) and issubclass(by_value, BaseException):
            return by_value
    return None
