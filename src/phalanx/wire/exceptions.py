"""Exceptions as bytes that travel anywhere, and back without running the code of their class.

Default pickling of an exception calls its class again with `args`: it fails for every class whose
`__init__` takes something else, loses `OSError.filename`, and one attribute that cannot be pickled loses all.
Here class, arguments, attributes and C-level members are pickled one by one; what cannot be pickled is left
out and named in a note. The bytes hold plain data only: unpickling them needs no class of the user's.
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
# Live objects of the raising process, or what the constructor restores anyway.
_SKIPPED_MEMBERS = {"args", "obj", "exceptions", "message"}
_SKIPPED_STATE = {"_message", "_exceptions"}  # of the exceptiongroup backport


@dataclass(frozen=True)
class _Item:
    """One pickled value; `data` is None where it could not be pickled."""

    name: str
    type_name: str
    data: bytes | None


@dataclass(frozen=True)
class _Packed:
    module: str
    qualname: str
    by_value: bytes | None
    args: tuple[_Item, ...] = ()
    members: tuple[_Item, ...] = ()
    state: tuple[_Item, ...] = ()
    children: tuple[_Packed, ...] | None = None
    cause: _Packed | None = None
    whole: bytes | None = None
    text: str = ""


@dataclass(frozen=True)
class Parts:
    """An unpacked exception before it is put together as an instance of some class."""

    cls: type[BaseException]
    args: tuple[Any, ...] = ()
    members: dict[str, Any] = field(default_factory=dict[str, Any])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    cause: BaseException | None = None
    whole: PhalanxError | None = None


def type_name_of(cls: type) -> str:
    """The name that a traceback shows: with the module, unless that is builtins or __main__."""
    module = str(getattr(cls, "__module__", "builtins"))
    qualname = str(getattr(cls, "__qualname__", cls.__name__))
    return qualname if module in ("builtins", "__main__") else f"{module}.{qualname}"


def text_of(exc: BaseException) -> str:
    """`str(exc)`, also of an exception whose `__str__` raises."""
    try:
        return str(exc)
    except Exception as error:
        return f"<str() of this {type(exc).__name__} raised {type(error).__name__}>"


def encodable(text: str) -> str:
    """The text with what UTF-8 cannot hold, a lone surrogate as of a file name, written as an escape."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def pack(exc: BaseException) -> bytes | None:
    """The exception as bytes, or None where it is too large or too strange to travel."""
    try:
        data = pickle.dumps(_pack(exc, 0), protocol=5)
    except Exception:
        return None
    return data if len(data) <= TOTAL_LIMIT else None


def unpack(data: bytes | None) -> BaseException | None:
    """The exception that `pack` was given, or None where its class is not to be had in this process."""
    parts = load_parts(data)
    if parts is None:
        return None
    try:
        return parts.whole or assemble(parts.cls, parts)
    except Exception:
        return None


def load_parts(data: bytes | None) -> Parts | None:
    """What `assemble` needs, or None where the class is not to be had in this process."""
    if data is None:
        return None
    try:
        return _load(pickle.loads(data))
    except Exception:
        return None


def assemble(cls: type[BaseException], parts: Parts) -> BaseException:
    """An instance of `cls`, which is `parts.cls` or derives from it, made without any Python `__init__`.

    Raises whatever the C-level constructor raises if it does not take the arguments.
    """
    native = _native_base(cls)
    exc = native.__new__(cls, *parts.args)
    # A class may keep other arguments than its base takes: members and state below hold what counts.
    with contextlib.suppress(Exception):
        native.__init__(exc, *parts.args)
    object.__setattr__(exc, "args", parts.args)
    for name, value in parts.members.items():
        _set_member(exc, name, value)
    exc.__dict__.update(parts.state)
    if parts.cause is not None:
        object.__setattr__(exc, "__cause__", parts.cause)
    return exc


def _pack(exc: BaseException, depth: int) -> _Packed:
    cls = type(exc)
    text = text_of(exc)[:10_000]
    if isinstance(exc, PhalanxError):
        whole = pickle.dumps(exc, protocol=5)
        return _Packed(str(cls.__module__), cls.__qualname__, None, text=text, whole=whole)
    children = None
    args = exc.args
    if isinstance(exc, _GROUP) and depth < _DEPTH:
        group: Any = exc
        children = tuple(_pack(child, depth + 1) for child in group.exceptions)
        args = (group.message,)
    cause = exc.__cause__
    return _Packed(
        str(cls.__module__),
        cls.__qualname__,
        _dumps(cls),
        args=tuple(_item(f"args[{i}]", value) for i, value in enumerate(args)),
        members=tuple(_item(name, value) for name, value in _members(exc)),
        state=tuple(_item(k, v) for k, v in vars(exc).items() if k not in _SKIPPED_STATE),
        children=children,
        cause=_pack(cause, depth + 1) if cause is not None and depth < _DEPTH else None,
        text=text,
    )


def _item(name: str, value: Value) -> _Item:
    data = _dumps(value)
    if data is not None and len(data) > ITEM_LIMIT:
        data = None
    return _Item(name, type_name_of(type(value)), data)


def _dumps(value: Value) -> bytes | None:
    # The objects are the user's: their __reduce__ and __getstate__ may raise anything.
    try:
        return cloudpickle.dumps(value, protocol=5)
    except Exception:
        return None


def _members(exc: BaseException) -> Iterator[tuple[str, Any]]:
    """Attributes that are not in `__dict__`: members of C exceptions (`OSError.filename`) and slots."""
    for cls in type(exc).__mro__:
        for name, member in vars(cls).items():
            if not isinstance(member, MemberDescriptorType | GetSetDescriptorType):
                continue
            if name in _SKIPPED_MEMBERS and not cls.__flags__ & _HEAP_TYPE:
                continue
            if name.startswith("__") and name.endswith("__"):
                continue
            value = _member_value(member, exc)
            if value is not None:
                yield name, value


def _member_value(member: MemberDescriptorType | GetSetDescriptorType, exc: BaseException) -> Value:
    try:
        return member.__get__(exc, type(exc))
    except Exception:
        return None


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
    missing = object()
    members = {item.name: _loads(item, lost, missing) for item in packed.members}
    state = {item.name: _loads(item, lost, missing) for item in packed.state}
    state = {name: value for name, value in state.items() if value is not missing}
    if lost:
        note = f"not sent with this exception, since it is too large or cannot be pickled: {', '.join(lost)}"
        state["__notes__"] = [*state.get("__notes__", ()), note]
    if packed.children is not None and sys.version_info < (3, 11):
        state.update(_message=args[0], _exceptions=tuple(args[1]))
    return Parts(
        cls,
        args,
        {name: value for name, value in members.items() if value is not missing},
        state,
        _child(packed.cause) if packed.cause is not None else None,
    )


def _child(packed: _Packed) -> BaseException:
    """A part of a group or a chain; a stand-in with its text where its class is not to be had."""
    parts = _load(packed)
    if parts is None:
        return PhalanxError(f"{packed.module}.{packed.qualname}: {packed.text}")
    return parts.whole or assemble(parts.cls, parts)


def _loads(item: _Item, lost: list[str], default: Value) -> Value:
    if item.data is not None:
        try:
            return pickle.loads(item.data)
        except Exception:
            # Its class is not importable here, or refuses to be rebuilt: as good as never sent.
            pass
    lost.append(f"{item.name} ({item.type_name})")
    return default


def _find_class(packed: _Packed) -> type[BaseException] | None:
    """The class by its name first: a class of the driver's `__main__` comes back by value as another one."""
    found = _named_class(packed.module, packed.qualname)
    if not _is_exception_class(found) and packed.by_value is not None:
        try:
            found = pickle.loads(packed.by_value)
        except Exception:
            return None
    return found if _is_exception_class(found) else None


def _is_exception_class(found: Value) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def _named_class(module: str, qualname: str) -> Value:
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except Exception:
        return None
    return found


def _native_base(cls: type[BaseException]) -> Value:
    """The C type that decides the memory layout, such as OSError: the only one whose `__new__` is safe."""
    base: type = cls
    while base.__flags__ & _HEAP_TYPE and base.__base__ is not None:
        base = base.__base__
    return base


def _set_member(exc: BaseException, name: str, value: Value) -> None:
    for cls in type(exc).__mro__:
        member = vars(cls).get(name)
        if isinstance(member, MemberDescriptorType | GetSetDescriptorType):
            # Read-only members are those that the C constructor has set already.
            with contextlib.suppress(AttributeError, TypeError):
                member.__set__(exc, value)
            return
