"""Pytrees: tuples, dicts and dataclasses ("structures"), which are flattened into leaves and rebuilt."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.dispatch.shardable import Replicate, copy_state, ops_for
from phalanx.display.text_format import first_of
from phalanx.errors import DispatchError
from phalanx.wire.value import is_tensor

_NO_STRUCTURES = frozenset({type(None), bool, int, float, str, bytes, list})


@dataclass(frozen=True)
class Node:
    """The children of a structure. ``rebuild(values)`` returns a structure of the same type and keys.

    Two structures can be joined child by child if ``kind`` and the set of ``keys`` are equal. ``step`` is the form of a
    key in error messages (``['ids']``, ``[0]``, ``.ids``).
    """

    kind: type
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    step: str = "[{!r}]"


@dataclass(frozen=True)
class Leaf:
    """A value that is not a structure, and its path, such as ``batch['ids']``."""

    path: str
    value: Any


#: Function that builds a structure from leaves: ``next`` for a leaf itself, else a :class:`Build`.
Builder = Callable[[Iterator[Any]], Any]
Flat = tuple[list[Leaf], Builder]


def is_future(value: object) -> bool:
    """Return whether ``value`` is a future, which stands for the result of a call."""
    return getattr(type(value), "__phalanx_future__", False) is True


def node_of(value: Any) -> Node | None:
    """Return the children of ``value``, or None if it is a leaf.

    Types registered with ``register_row_type`` are leaves. Of the subclasses of tuple, only named tuples and struct
    sequences are structures, because the constructors of other subclasses are unknown.
    """
    cls = type(value)
    if isinstance(value, Replicate) or is_future(value) or ops_for(value) is not None:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass_node(value)
    if isinstance(value, tuple):
        return _tuple_node(value)
    if isinstance(value, dict | UserDict):
        keys = tuple(value)
        values = tuple(value.data.values() if isinstance(value, UserDict) else value.values())
        return Node(cls, keys, values, functools.partial(_rebuild_dict, value, keys))
    return None


@dataclass(eq=False)
class Build:
    """Function that builds a structure like a given structure, from other leaves in the same order.

    ``parts`` are the number of leaves and the builder of each child.
    """

    node: Node
    parts: Sequence[tuple[int, Builder]]

    def __call__(self, values: Iterator[Any]) -> Any:
        return self.node.rebuild([build(values) for _, build in self.parts])

    def every(self, columns: Sequence[Sequence[Any]], count: int) -> list[Any]:
        """Return ``count`` structures from ``columns``, the values of each leaf. Fast for plain dicts and tuples."""
        if not self.parts:
            return [self.node.rebuild(()) for _ in range(count)]
        children: list[Sequence[Any]] = []
        at = 0
        for leaves, build in self.parts:
            part = columns[at : at + leaves]
            children.append(build.every(part, count) if isinstance(build, Build) else part[0])
            at += leaves
        rows = zip(*children, strict=True)
        if self.node.kind is tuple:
            return list(rows)
        if self.node.kind is dict:
            keys = self.node.keys
            return [dict(zip(keys, row, strict=True)) for row in rows]
        return [self.node.rebuild(row) for row in rows]


def flatten(value: Any, path: str) -> Flat:
    """Return the leaves of ``value`` in order, and a function that builds the same structure from other leaves.

    Raises:
        DispatchError: if the structure contains itself, or is nested too deep.
    """
    try:
        return _flatten(value, path)
    except RecursionError:
        raise DispatchError(
            f"{path or 'a value'} is a {type(value).__name__} that holds itself or is nested too deep to be taken "
            "apart for its rows; give rows in a flat dict, or px.replicate(...) to give it whole to every rank"
        ) from None


def _flatten(value: Any, path: str) -> Flat:
    node = node_of(value)
    if node is None:
        return [Leaf(path, value)], next
    children = zip(node.keys, node.values, strict=True)
    parts = [_flatten(child, path + node.step.format(key)) for key, child in children]
    leaves = [leaf for part, _ in parts for leaf in part]
    return leaves, Build(node, [(len(part), build) for part, build in parts])


def holds(value: Any, wanted: Callable[[Any], bool]) -> bool:
    """Return whether ``value`` is a ``wanted`` leaf, or a structure with such a leaf, which may contain itself."""
    left, met = [value], dict[int, Any]()  # keeps visited objects alive, so that no id is reused
    while left:
        each = left.pop()
        children = _children(each)
        if children is None:
            if wanted(each):
                return True
        elif id(each) not in met:
            met[id(each)] = each
            left.extend(children)
    return False


def replaced(value: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return a copy of ``value`` with ``change(leaf)`` for each ``wanted`` leaf; ``value`` itself if there is none."""
    if not holds(value, wanted):
        return value
    leaves, build = flatten(value, "value")
    return build(change(leaf.value) if wanted(leaf.value) else leaf.value for leaf in leaves)


def described(value: Any) -> str:
    """Describe a value in an error: "a list of 3 elements", "a dict of ids, mask", "a Tensor of shape (2,)", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    text = f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
    if isinstance(value, list | tuple):
        return f"{text} of {len(value)} elements"
    if is_tensor(value) and value.is_nested:  # may have no shape
        return f"a nested {name} of dtype {value.dtype}"
    if is_tensor(value) or isinstance(value, np.ndarray):
        return f"{text} of shape {tuple(value.shape)} and dtype {value.dtype}"
    node = node_of(value)
    return text if node is None or not node.keys else f"{text} of {first_of(node.keys)}"


def unwrap(value: Any) -> Any:
    """Return ``value`` with the values in place of their ``px.replicate`` wrappers, as workers get it."""
    return replaced(value, lambda leaf: isinstance(leaf, Replicate), lambda leaf: leaf.value)


def _children(value: Any) -> Iterable[Any] | None:
    """Return the values of :func:`node_of`, but faster; None for a leaf."""
    cls = type(value)
    if cls in (dict, tuple) and ops_for(value) is None:
        return value.values() if cls is dict else value
    node = None if cls in _NO_STRUCTURES else node_of(value)
    return None if node is None else node.values


def _tuple_node(value: tuple[Any, ...]) -> Node | None:
    cls, fields = type(value), getattr(value, "_fields", None)
    rebuild: Callable[[Sequence[Any]], Any]
    if cls is tuple:
        rebuild = tuple
    elif isinstance(fields, tuple) and hasattr(cls, "_make"):
        rebuild = cls._make  # pyright: ignore[reportAttributeAccessIssue]
    elif hasattr(cls, "n_sequence_fields"):
        rebuild = cls
    else:
        return None
    if fields:
        return Node(cls, fields, tuple(value), rebuild, ".{}")
    return Node(cls, tuple(range(len(value))), tuple(value), rebuild)


def _dataclass_node(value: Any) -> Node:
    names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
    values = tuple(getattr(value, name) for name in names)
    return Node(type(value), names, values, functools.partial(_rebuild_dataclass, value, names), ".{}")


def _rebuild_dict(source: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    items = dict(zip(keys, values, strict=True))
    if type(source) is dict:
        return items
    if isinstance(source, UserDict):
        renewed = copy.copy(source)
        renewed.data = items
        return renewed
    return _refilled(source, items)


def _refilled(source: dict[Any, Any], items: Mapping[Any, Any]) -> Any:
    """Return a dict of the same class and attributes with other items, without running code of a subclass."""
    kind = next(base for base in (OrderedDict, defaultdict, dict) if isinstance(source, base))
    renewed = _new(kind, source)
    if isinstance(source, defaultdict):
        renewed.default_factory = source.default_factory
    copy_state(source, renewed)
    put = OrderedDict.__setitem__ if kind is OrderedDict else dict.__setitem__
    for key, value in items.items():
        put(renewed, key, value)
    return renewed


def _new(kind: Any, source: Any) -> Any:
    cls = type(source)
    try:
        return kind.__new__(cls)
    except TypeError as error:
        raise DispatchError(
            f"a {cls.__qualname__} cannot be taken apart and built again by rows: {error}; pass a dict with its "
            "items, wrap it in px.replicate(...), or teach its rows with px.data.register_row_type"
        ) from error


def _rebuild_dataclass(source: Any, names: tuple[str, ...], values: Sequence[Any]) -> Any:
    # Without __init__, which may reject the shards.
    fields = dict(zip(names, values, strict=True))
    if isinstance(source, dict):  # transformers' ModelOutput is a dict and a dataclass at once
        renewed = _refilled(source, {key: fields.get(key, held) for key, held in source.items()})
    else:
        renewed = _new(type(source), source)
        copy_state(source, renewed)
    for name, value in fields.items():
        object.__setattr__(renewed, name, value)
    return renewed
