"""Encode values that differ only in the bytes of their tensors and arrays, as the pieces of rows do.

What a pickler would say of one it would say of the next, so that it is asked once: per value there remains what
`phalanx.wire.pack` does for each tensor and array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.wire import pack, unpack
from phalanx.wire.codec import ATOMS, Encoded
from phalanx.wire.lazy import is_tensor_type
from phalanx.wire.value import Value

_MOST_MISSES = 3


class Alike:
    """Knows the last value that was encoded in full; others are like it if their structure, what is in it beside
    tensors and arrays, and all that is said of these are the same."""

    def __init__(self) -> None:
        self._first: Any = None
        self._head = b""
        self._reduced: list[pack.Reduced] = []
        self._misses = 0

    def encoded(self, value: Value) -> Encoded | None:
        """What `encode` would give; None where it has to be asked."""
        if not self._reduced:
            return None
        leaves = _leaves(self._first, value)
        if leaves is None or len(leaves) != len(self._reduced):
            return None
        sink = pack.Sink()
        for leaf, known in zip(leaves, self._reduced, strict=True):
            if _reduce(sink, leaf) != known:
                return None
        buffers = sink.buffers
        return Encoded(self._head, buffers, len(buffers))

    def learn(self, value: Value, encoded: Encoded) -> None:
        """Note a value and what `encode` gave of it; no more after a few that were not alike."""
        self._misses += 1
        self._first, self._reduced = None, []
        if self._misses > _MOST_MISSES or encoded.tokens or len(encoded.buffers) != encoded.own:
            return
        leaves = _leaves(value, value)
        if not leaves:
            return
        sink = pack.Sink()
        reduced = [_reduce(sink, leaf) for leaf in leaves]
        sizes = [buffer.nbytes for buffer in sink.buffers]
        if None in reduced or sizes != [buffer.nbytes for buffer in encoded.buffers]:
            return  # something else in it has tensors or arrays too
        self._first, self._head = value, encoded.head
        self._reduced = [one for one in reduced if one is not None]


def _reduce(sink: pack.Sink, leaf: Any) -> pack.Reduced | None:
    """What is said of a tensor or array, where that is all in words that are compared as such."""
    reduced = pack.reduce_array(sink, leaf) if type(leaf) is np.ndarray else pack.reduce_tensor(sink, leaf)
    if reduced is None or len(reduced) != 2 or reduced[0] not in (unpack.array, unpack.tensor):
        return None
    return reduced if type(reduced[1][1]) is str else None


def _leaves(first: Any, value: Any) -> list[Any] | None:
    """The tensors and arrays of a value, in the order in which a pickler meets them; None if it is unlike the first.

    Nothing in it may be there twice: the second time a pickler only refers to it.
    """
    found: list[Any] = []
    met: list[int] = []
    if not _walk(first, value, found, met) or len(set(met)) != len(met):
        return None
    return found


def _walk(first: Any, value: Any, found: list[Any], met: list[int]) -> bool:
    kind = type(value)
    if kind is not type(first):
        return False
    if kind in ATOMS:
        return value is first
    if kind is dict:
        return _walk_items(first, value, found, met)
    if kind is tuple or kind is list:
        if len(value) != len(first):
            return False
        if value:  # there is but one empty tuple
            met.append(id(value))
        for one, other in zip(first, value, strict=True):  # noqa: SIM110 - a generator would cost more than the rest
            if not _walk(one, other, found, met):
                return False
        return True
    if kind is np.ndarray or is_tensor_type(kind):
        met.append(id(value))
        found.append(value)
        return True
    return value is first


def _walk_items(first: dict[Any, Any], value: dict[Any, Any], found: list[Any], met: list[int]) -> bool:
    if len(value) != len(first):
        return False
    met.append(id(value))
    for (key, one), (name, other) in zip(first.items(), value.items(), strict=True):
        if key is not name or not _walk(one, other, found, met):
            return False
    return True
