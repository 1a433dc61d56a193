"""What a rank gives back for one call, and what is known of an output that lies in two halves.

A large output of rows that may be needed on several nodes is given back as two halves, each stored by itself. Whoever
needs some rows of it, and they need not be those of one whole output, then fetches at most half an output too much at
either end of what it needs: its own share and one output at most. On one node rows are read where they lie, and an
output stays whole: it can then be read without any copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.wire.value import Value

#: How many objects a rank gives back: its output; a :class:`PartInfo` before it, for a result that may be handed on by
#: reference; or that and such a result in two halves (the second one None where it is whole all the same).
OUTPUT, DESCRIBED, HALVED = 1, 2, 3

_HALVED_FROM = 256 << 10  # bytes; below, another object costs more than the bytes that it saves


@dataclass(frozen=True)
class BackendRef:
    """A backend's reference within an output. It is left for the backend to pickle, which counts who holds it."""

    ref: Any


class PartInfo(NamedTuple):
    """What is known of an output without fetching it.

    One that lies in two halves has its first ``first_rows`` rows in the first; one that lies in one, all.
    ``settings`` are path and digest of each leaf without rows, by which outputs are compared; no digest where the leaf
    is no plain value.
    """

    rows: int | None
    nbytes: int
    first_rows: int | None = None
    settings: tuple[tuple[str, bytes], ...] = ()

    def halved(self) -> PartInfo | None:
        """The same of the output in two halves, the first no smaller; None where it is not worth that."""
        if self.rows is None or self.rows < 2 or self.nbytes < _HALVED_FROM:
            return None
        return self._replace(first_rows=-(-self.rows // 2))

    def rows_of_halves(self, rows: int) -> tuple[int, int]:
        """How many of the first ``rows`` rows lie in the first half, and how many in the second."""
        first = min(self.first_rows or 0, rows)
        return first, rows - first


class StreamEnd(NamedTuple):
    """What a rank gives back last of a call that streams: its method is over, after so many items."""

    items: int


@dataclass(frozen=True)
class Halves:
    """An output of rows that came in two halves."""

    first: Any
    second: Any


def with_rests(outputs: Sequence[Any], rests: Sequence[Any]) -> list[Any]:
    """The outputs, each with the second half that belongs to it; ``rests`` has None for one that is whole."""
    if not rests:
        return list(outputs)
    return [
        output if rest is None else Halves(output, rest) for output, rest in zip(outputs, rests, strict=True)
    ]


def halves_of(output: Value) -> tuple[Any, ...]:
    """The halves of an output, or the output itself where it came whole."""
    return (output.first, output.second) if isinstance(output, Halves) else (output,)
