"""Structures: tuples, dicts and dataclasses, which are taken apart and rebuilt leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from phalanx.dispatch.shardable import Replicate, ops_for


@dataclass(frozen=True)
class Node:
    """One structure taken apart: ``rebuild(values)`` makes another of the same type and keys.

    ``kind`` and ``keys`` are equal exactly where two structures can be joined child by child; ``steps`` are
    the keys as they are written in a message (``['ids']``, ``[0]``, ``.ids``).
    """

    kind: type
    keys: tuple[Any, ...]
    steps: tuple[str, ...]
    values: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    named: bool = True
    """Children are found by key; False for tuples, where ``keys`` is only the number of children."""


@dataclass(frozen=True)
class Leaf:
    """A value that is not a structure, and where it stands, such as ``batch['ids']``."""

    path: str
    value: Any


def is_future(value: object) -> bool:
    """Whether ``value`` is the result of a call that is not here yet."""
    return getattr(type(value), "__phalanx_future__", False) is True


def node_of(value: Any) -> Node | None:
    """``value`` taken apart one level, or None where it is a leaf.

    Types registered with ``register_shardable`` are leaves. Of the subclasses of tuple, only named tuples and
    struct sequences are structures: how any other is built is not known.
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
        steps = tuple(f"[{key!r}]" for key in keys)
        values = tuple(value.data.values() if isinstance(value, UserDict) else value.values())
        return Node(cls, keys, steps, values, functools.partial(_rebuild_dict, value, keys))
    return None


class Build:
    """Builds a structure like one that was taken apart, from other leaves in the same order."""

    def __init__(self, node: Node, parts: Sequence[tuple[int, Callable[[Iterator[Any]], Any]]]) -> None:
        self._node = node
        self._parts = parts  # of each child: how many leaves it has, and what builds it

    def __call__(self, values: Iterator[Any]) -> Any:
        return self._node.rebuild([build(values) for _, build in self._parts])

    def every(self, columns: Sequence[Sequence[Any]], count: int) -> list[Any]:
        """``count`` at once: ``columns`` are the values of each leaf. Plain dicts and tuples are made quickly."""
        if not self._parts:
            return [self._node.rebuild(()) for _ in range(count)]
        children: list[Sequence[Any]] = []
        at = 0
        for leaves, build in self._parts:
            part = columns[at : at + leaves]
            children.append(build.every(part, count) if isinstance(build, Build) else part[0])
            at += leaves
        rows = zip(*children, strict=True)
        if self._node.kind is tuple:
            return list(rows)
        if self._node.kind is dict:
            keys = self._node.keys
            return [dict(zip(keys, row, strict=True)) for row in rows]
        return [self._node.rebuild(row) for row in rows]


def flatten(value: Any, path: str) -> tuple[list[Leaf], Callable[[Iterator[Any]], Any]]:
    """The leaves of ``value`` in order, and what builds the same structure from other leaves.

    That is ``next`` for a value that is a leaf itself, and a :class:`Build` for others.
    """
    node = node_of(value)
    if node is None:
        return [Leaf(path, value)], next
    parts = [flatten(child, path + step) for step, child in zip(node.steps, node.values, strict=True)]
    leaves = [leaf for part, _ in parts for leaf in part]
    return leaves, Build(node, [(len(part), build) for part, build in parts])


def unwrap(value: Any) -> Any:
    """``value`` as the worker sees it: what is wrapped in ``px.replicate`` stands in its own place.

    A value without a wrapper is given back itself.
    """
    if isinstance(value, Replicate):
        return value.value
    leaves, build = flatten(value, "")
    if build is next or not any(isinstance(leaf.value, Replicate) for leaf in leaves):
        return value
    return build(leaf.value.value if isinstance(leaf.value, Replicate) else leaf.value for leaf in leaves)


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
    steps = tuple(f".{name}" for name in fields) if fields else tuple(f"[{i}]" for i in range(len(value)))
    return Node(cls, (len(value),), steps, tuple(value), rebuild, named=False)


def _dataclass_node(value: Any) -> Node:
    names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
    steps = tuple(f".{name}" for name in names)
    values = tuple(getattr(value, name) for name in names)
    return Node(type(value), names, steps, values, functools.partial(_rebuild_dataclass, value, names))


def _rebuild_dict(source: Any, keys: tuple[Any, ...], values: Sequence[Any]) -> Any:
    items = dict(zip(keys, values, strict=True))
    if type(source) is dict:
        return items
    copied = source.copy() if hasattr(source, "copy") else type(source)(source)
    if isinstance(copied, UserDict):
        copied.data = items
    else:
        copied.update(items)
    return copied


def _rebuild_dataclass(source: Any, names: tuple[str, ...], values: Sequence[Any]) -> Any:
    # Not through __init__: it may refuse a list by piece. What was cached from the whole stays behind.
    cls = type(source)
    copied = cast("Any", cls).__new__(cls)
    for name, held in getattr(source, "__dict__", {}).items():
        if not isinstance(getattr(cls, name, None), functools.cached_property):
            object.__setattr__(copied, name, held)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(copied, name, value)
    if isinstance(source, dict):  # transformers' ModelOutput is a dict and a dataclass at once
        fields = dict(zip(names, values, strict=True))
        put = OrderedDict.__setitem__ if isinstance(source, OrderedDict) else dict.__setitem__
        for key, held in source.items():
            put(copied, key, fields.get(key, held))
    return copied
