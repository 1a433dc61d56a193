"""Pack exceptions as bytes that any process can read, and unpack them without running the code of their class.

Default pickling of an exception calls its class again with `args`: it fails for every class whose `__init__` takes
other arguments, loses `OSError.filename`, and loses the exception if any attribute cannot be pickled. Here class,
arguments and attributes, also those of C classes, are pickled separately. A note names the values that were not sent.
The outer pickle contains plain data only, so reading it needs no class of the user's.
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
"""Maximum pickled size of an argument or attribute in bytes; larger values are not sent."""
TOTAL_LIMIT = 16 << 20
"""Maximum packed size of an exception in bytes; a larger exception is sent as text only."""
_DEPTH = 8
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was created by a class statement, not in C
# Members that refer to live objects of the raising process, or that the constructor restores.
_SKIPPED_MEMBERS = {"args", "obj", "exceptions", "message"}
_SKIPPED_STATE = {"_message", "_exceptions"}  # of the exceptiongroup backport
_MEMBER = (MemberDescriptorType, GetSetDescriptorType)
_MISSING = object()


@dataclass(frozen=True)
class _Item:
    """A pickled value; `data` is None if the value is too large or cannot be pickled."""

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
    """The unpacked parts of an exception, from which `assemble` creates an instance."""

    cls: type[BaseException]
    args: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)
    cause: BaseException | None = None
    whole: PhalanxError | None = None


def type_name_of(cls: type) -> str:
    """Return the name of a class as in a traceback: with its module, unless this is builtins or __main__."""
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
    """Return the text with escapes for characters that UTF-8 cannot encode, such as a lone surrogate of a file name."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def pack(exc: BaseException) -> bytes | None:
    """Return the exception as bytes, or None if it is too large or cannot be packed."""
    try:
        data = pickle.dumps(_pack(exc, 0), protocol=5)
    except Exception:
        return None
    return data if len(data) <= TOTAL_LIMIT else None


def pack_when_pickled(exc: Exception) -> None:
    """Make the pickle of an exception, if Python cannot pickle it, contain the bytes of `pack`."""
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:
        reduced = unpack, (pack(exc),)
        object.__setattr__(exc, "__reduce_ex__", lambda _protocol: reduced)


def unpack(data: bytes | None) -> BaseException | None:
    """Return a packed exception, or None if there is none or this process cannot recreate it."""
    parts = load_parts(data)
    try:
        return None if parts is None else parts.whole or assemble(parts.cls, parts)
    except Exception:
        return None


def load_parts(data: bytes | None) -> Parts | None:
    """Return the parts of a packed exception, or None if there is none or this process cannot load its class."""
    try:
        return None if data is None else _load(pickle.loads(data))
    except Exception:
        return None


def assemble(cls: type[BaseException], parts: Parts) -> BaseException:
    """Return an instance of `cls` (`parts.cls` or a subclass of it) without calling any Python `__init__`.

    Raises:
        Exception: if the C constructor rejects the arguments.
    """
    native: Any = (
        cls  # becomes the C type that defines the layout, such as OSError: only its `__new__` is safe to call
    )
    while native.__flags__ & _HEAP_TYPE and native.__base__ is not None:
        native = native.__base__
    exc: BaseException = native.__new__(cls, *parts.args)
    # The base may reject the arguments that a class keeps; attributes are restored below in any case.
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
    # Not a user's subclass, whose module may not be importable.
    if isinstance(exc, PhalanxError) and module.startswith("phalanx."):
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
    # The user's __reduce__ and __getstate__ may raise any exception.
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
    """Return a member of an exception group or a cause; if its class is missing here, a PhalanxError with its text."""
    parts = _load(packed)
    if parts is None:
        return PhalanxError(f"{packed.module}.{packed.qualname}: {packed.text}")
    return parts.whole or assemble(parts.cls, parts)


def _loads(item: _Item, lost: list[str], default: Value) -> Value:
    if item.data is not None:
        try:
            return pickle.loads(item.data)
        except Exception:
            # The class cannot be imported here or fails to unpickle: report the value as not sent.
            pass
    lost.append(f"{item.name} ({item.type_name})")
    return default


def _find_class(packed: _Packed) -> type[BaseException] | None:
    """Return the class, by name if possible: a pickled class of `__main__` would not be the driver's own class."""
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
