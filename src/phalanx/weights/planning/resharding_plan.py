"""The plan of a sync: which piece of which tensor goes from which source rank to which target ranks, in one order."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from phalanx.weights.planning.boxes import Box, volume
from phalanx.weights.planning.locality import Hop
from phalanx.weights.planning.shard_manifest import DTYPE_BYTES

__all__ = ["Lane", "Pair", "Piece", "Plan"]


class Pair(NamedTuple):
    """A tensor's name on both sides."""

    source: str
    target: str


class Piece(NamedTuple):
    """One box that travels once from ``source`` to all of ``targets``.

    ``box`` is in coordinates of the global tensor (of the part, where one side is fused); ``source_at`` and
    ``target_at`` are where it begins in the local tensors.
    """

    source: int
    targets: tuple[int, ...]
    hop: Hop
    box: Box
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]


@dataclass(frozen=True)
class Lane:
    """Tensors that travel alike: each of ``pairs`` in each of ``pieces``.

    Values are cast from ``source_dtype`` to ``dtype`` at the source.
    """

    source_dtype: str
    dtype: str
    pairs: tuple[Pair, ...]
    pieces: tuple[Piece, ...]

    def nbytes(self, piece: Piece) -> int:
        """Bytes of ``piece`` of one pair on the way."""
        return volume(piece.box) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """What moves in a sync. Equal manifests and places give an equal plan, in every process.

    Attributes:
        lanes: in the order in which all ranks work.
        echoes: (name, its twin) at the target: after the move the twin is copied from the name, locally.
        ties: (name, the name whose storage it is) at the target: arrives with it.
        surplus: names of the source that the target does not take.
        sources, targets: how many ranks each side has.
    """

    lanes: tuple[Lane, ...]
    echoes: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    surplus: tuple[str, ...]
    sources: int
    targets: int

    def of(self, *, source: int | None = None, target: int | None = None) -> Plan:
        """The part of the plan that concerns one rank, in the same order."""
        lanes = (
            Lane(
                lane.source_dtype,
                lane.dtype,
                lane.pairs,
                tuple(
                    piece
                    for piece in lane.pieces
                    if piece.source == source or (target is not None and target in piece.targets)
                ),
            )
            for lane in self.lanes
        )
        return Plan(
            tuple(lane for lane in lanes if lane.pieces),
            self.echoes if target is not None else (),
            self.ties if target is not None else (),
            (),
            self.sources,
            self.targets,
        )

    def moves(self, hops: Sequence[Hop] | None = None) -> Iterator[tuple[Lane, Pair, Piece]]:
        """Every piece of every tensor, in the order in which all ranks work."""
        for lane in self.lanes:
            pieces = [piece for piece in lane.pieces if hops is None or piece.hop in hops]
            for pair in lane.pairs if pieces else ():
                for piece in pieces:
                    yield lane, pair, piece

    @cached_property
    def nbytes(self) -> int:
        """Bytes that arrive, summed over the target ranks; echoes and ties not counted again."""
        return sum(
            lane.nbytes(piece) * len(piece.targets) * len(lane.pairs)
            for lane in self.lanes
            for piece in lane.pieces
        )

    @cached_property
    def digest(self) -> str:
        """What all ranks compare before the first byte."""
        text = hashlib.blake2b(digest_size=16)
        for lane in self.lanes:
            names = [name for pair in lane.pairs for name in pair]
            text.update("\0".join((lane.source_dtype, lane.dtype, *names, "")).encode())
            text.update(_numbers(lane.pieces).tobytes())
        text.update(repr((self.echoes, self.ties, self.sources, self.targets)).encode())
        return text.hexdigest()


def _numbers(pieces: Sequence[Piece]) -> array[int]:
    numbers = array("q")
    for piece in pieces:
        dims = len(piece.source_at)
        numbers.extend((piece.source, piece.hop, len(piece.targets), *piece.targets, dims))
        for offsets in (*piece.box, piece.source_at, piece.target_at):
            numbers.extend(offsets)
    return numbers
