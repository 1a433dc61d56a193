"""The plan of a call: the called ranks, their arguments, and how their results become a single value."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from phalanx.declare.dispatch_modes import Collect
from phalanx.topology.mesh import Mesh


@dataclass(frozen=True)
class Same:
    """An argument value that every called rank gets; it is encoded and stored once."""

    value: Any


@dataclass(frozen=True)
class Each:
    """An argument with a separate value for each called rank, aligned with ``CallPlan.ranks``.

    Ranks may share a value (the same object): it is then encoded and stored once.
    """

    values: Sequence[Any]


@dataclass(frozen=True)
class FuturePiece:
    """Piece ``index`` of ``count`` of the rows of a result that is not here yet.

    The rank that gets it fetches only the source parts which overlap the piece. ``expected_rows`` is the row
    count of the other arguments (None: there are none), checked on arrival.
    """

    future: Any
    index: int
    count: int
    pad_to_multiple: int | None = None
    expected_rows: int | None = None


@dataclass(frozen=True)
class GatherPlan:
    """How outputs become the call's value.

    ``collect`` is that of a mode: ``"first"`` (the single output itself), ``"list"`` (outputs of ``take`` in that
    order), ``"join"`` (outputs of ``take`` joined along dim 0), ``"none"``, or a function of (group, outputs of
    ``take``). ``take`` are positions in ``CallPlan.ranks``. ``rows`` holds, per taken position, the real rows of its
    piece; ``trim`` (rows given to the rank, real rows among them) where padding was added. ``order`` is the
    permutation that restores the caller's rows (row j of the joined result belongs at place ``order[j]``).
    ``ranks`` are the ranks taken, for messages; None where they equal ``take``.
    """

    collect: Collect
    take: Sequence[int]
    trim: Sequence[tuple[int, int]] | None = None
    order: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    ranks: Sequence[int] | None = None


@dataclass(frozen=True)
class CallPlan:
    """All decisions about a call before any message is sent.

    ``rows`` are the real rows by position, ``pieces`` the number of the piece that each position gets, where rows or
    elements are split; two positions with the same number get the same piece.
    """

    ranks: Sequence[int]
    args: tuple[Same | Each, ...]
    kwargs: Mapping[str, Same | Each]
    gather: GatherPlan
    rows: Sequence[int] | None = None
    shared: tuple[Any, ...] = field(default=())
    pieces: Sequence[int] | None = None

    def arguments(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the positional and the keyword arguments of each position, in order."""
        size, count, names = len(self.ranks), len(self.args), tuple(self.kwargs)
        columns = [
            itertools.repeat(argument.value, size) if isinstance(argument, Same) else argument.values
            for argument in (*self.args, *self.kwargs.values())
        ]
        for values in zip(*columns, strict=True) if columns else itertools.repeat((), size):
            yield values[:count], dict(zip(names, values[count:], strict=True)) if names else {}

    def keeps(self, position: int) -> bool:
        """Return whether the output of the rank at ``position`` is part of the result."""
        return len(self.gather.take) == len(self.ranks) or position in self._taken

    def without_arguments(self) -> CallPlan:
        """Return the plan without the caller's values, once the call was sent."""
        if not self.args and not self.kwargs:
            return self
        return CallPlan(self.ranks, (), {}, self.gather, self.rows, pieces=self.pieces)

    @cached_property
    def _taken(self) -> frozenset[int]:
        return frozenset(self.gather.take)


class Target(Protocol):
    """Facts on a group that planning needs; custom functions receive it as ``group``."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str = "default") -> Mesh:
        """The group's mesh of that name, over ``world_size`` ranks; DispatchError where there is none."""
        ...
