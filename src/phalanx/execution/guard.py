"""Debug mode: whether a worker wrote into tensors that it was given to read."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import DispatchError
from phalanx.wire.codec import large_leaves
from phalanx.wire.lazy import is_tensor


@dataclass(frozen=True)
class _Sealed:
    """Memory that one argument reads, and what it held."""

    name: str
    view: memoryview
    checksum: int


class Guard:
    """The read-only tensors of one call. ``views`` takes the memory in which its arguments arrive."""

    def __init__(self) -> None:
        self.views: list[memoryview] = []
        self._sealed: list[_Sealed] = []

    def seal(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what the tensors of the arguments hold. Arrays need no check: they cannot be written to."""
        by_address = {np.frombuffer(view, np.uint8).ctypes.data: view for view in self.views if view.nbytes}
        for name, value in _named(method, args, kwargs):
            for leaf in large_leaves(value, 1):
                view = by_address.get(leaf.untyped_storage().data_ptr()) if is_tensor(leaf) else None
                if view is not None:
                    self._sealed.append(_Sealed(name, view, zlib.crc32(view)))

    def check(self, method: str, rank: int) -> None:
        """Compare with what they hold now.

        Raises:
            DispatchError: one was changed.
        """
        changed = dict.fromkeys(one.name for one in self._sealed if zlib.crc32(one.view) != one.checksum)
        if changed:
            raise DispatchError(
                f"{method}(): read-only argument {', '.join(map(repr, changed))} was changed while rank {rank} ran "
                "the call, by this rank or by another on its node; all of them read the same memory. Work on a copy "
                "(x.clone()), or pass the value without px.readonly or readonly=True"
            )


def _named(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    try:
        names = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        names = []
    for index, value in enumerate(args):
        yield (names[index] if index < len(names) else f"argument {index + 1}"), value
    yield from kwargs.items()
