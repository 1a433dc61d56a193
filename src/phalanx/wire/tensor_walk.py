"""Sizes of values, and the large tensors and arrays inside values, found without encoding."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import UserDict
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.wire.lazy import is_tensor, lazy
from phalanx.wire.value import Value

if TYPE_CHECKING:
    import torch

    Leaf = torch.Tensor | np.ndarray[Any, Any]
else:
    torch = lazy("torch")

#: Property with the bytes of a value, of library classes without tensors. Such values occur in long lists, and are
#: counted without a walk through their attributes.
TELLS = "__phalanx_nbytes__"
_NUMBER_BYTES = 8  # maximum bytes of a number in a pickle stream, with its opcode
_OBJECT_BYTES = 64  # assumed bytes of an object of unknown size
_NUMBERS = frozenset({NoneType, bool, int, float, complex})
_TEXTS = frozenset({str, bytes, bytearray})


def nbytes_of(value: Value, skip: tuple[type, ...] = (), known: Collection[int] = ()) -> int:
    """Return the approximate encoded size of ``value`` in bytes: exact for dense tensors and arrays; 8 per number.

    Looks into lists, tuples, dicts, sets, dataclasses, TensorDicts, modules, closures and objects that pickle
    by their ``__dict__``. An object that occurs twice counts once. Objects whose type is in ``skip``, or whose id is
    in ``known``, do not count.
    """
    total = 0
    for item in _walk(value, skip, known):
        kind = type(item)
        if is_tensor(item):
            total += _tensor_bytes(item)
        elif isinstance(item, np.ndarray):
            total += item.nbytes
        elif kind in _TEXTS:
            total += len(item)
        elif kind in _NUMBERS:
            total += _NUMBER_BYTES
        elif isinstance(item, _Many):
            total += item.nbytes
        else:
            total += _size_it_tells(item)
    return total


def _size_it_tells(item: Value) -> int:
    """Return the ``nbytes`` of Arrow tables and similar objects; a fixed guess for other objects."""
    nbytes = getattr(item, TELLS, None)
    if nbytes is None:
        with contextlib.suppress(Exception):  # a property of the user's class
            nbytes = getattr(item, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else _OBJECT_BYTES


def _tensor_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.values().nbytes * 2  # assumes that the indices are about as large as the values
    return tensor.numel() * tensor.element_size()


def large_leaves(value: Value, threshold: int) -> list[Leaf]:
    """Return the distinct tensors and arrays of at least ``threshold`` bytes in ``value``, depth first."""
    found: list[Leaf] = []
    for item in _walk(value):
        if is_tensor(item):
            if _tensor_bytes(item) >= threshold:
                found.append(item)
        elif isinstance(item, np.ndarray) and item.nbytes >= threshold:
            found.append(item)
    return found


@dataclasses.dataclass(frozen=True)
class _Many:
    """A sequence of numbers or strings, visited as a single object."""

    nbytes: int


def _walk(value: Value, skip: tuple[type, ...] = (), known: Collection[int] = ()) -> Iterator[Any]:
    """Yield each object in the value once, depth first, without containers; a list of atoms is a single object."""
    stack: list[Any] = [value]
    seen: set[int] = set(known)
    alive: list[Any] = []  # keeps temporary lists alive, so that no id is reused
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind in _NUMBERS or kind in _TEXTS or kind is _Many:
            yield item
            continue
        if id(item) in seen or kind in skip:
            continue
        seen.add(id(item))
        inside = _children(item)
        if inside is None:
            yield item
        else:
            alive.append(inside)
            stack.extend(reversed(inside))


def _children(item: Value) -> list[Any] | None:
    """Return the contents of a container, or None for a leaf."""
    if is_tensor(item) or isinstance(item, np.ndarray):
        return None
    if isinstance(item, dict | UserDict):
        return _summary(list(item.keys())) + _summary(list(item.values()))
    if isinstance(item, list | tuple | set | frozenset):
        return _summary(list(item))
    if "torch" in sys.modules and isinstance(item, torch.nn.Module):
        return [*item.parameters(), *item.buffers()]
    tensordict = sys.modules.get("tensordict")  # 3 s to import; a sender of a TensorDict has imported it
    if tensordict is not None and isinstance(item, tensordict.TensorDictBase):
        stacked = getattr(item, "tensordicts", None)  # a lazy stack: its values() would be new tensors
        return list(item.values()) if stacked is None else list(stacked)
    if hasattr(type(item), TELLS):
        return None
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    if isinstance(item, FunctionType):
        return _captured(item)
    return _attributes(item)


def _summary(items: list[Any]) -> list[Any]:
    kinds = set(map(type, items))
    if kinds <= _NUMBERS:
        return [_Many(_NUMBER_BYTES * len(items))]
    if kinds <= _TEXTS:
        return [_Many(sum(map(len, items)))]
    return items


def _captured(function: FunctionType) -> list[Any] | None:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return [*cells, *(function.__defaults__ or ())] or None


def _is_filled(cell: Value) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # the variable is not bound yet
        return False
    return True


def _attributes(item: Value) -> list[Any] | None:
    """Return the attributes of an object whose class has the default pickling; None for other objects."""
    cls = type(item)
    plain = not isinstance(item, ModuleType) and (
        cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and getattr(cls, "__getstate__", None) is getattr(object, "__getstate__", None)
    )
    own = getattr(item, "__dict__", None)
    return list(own.values()) if plain and type(own) is dict else None
