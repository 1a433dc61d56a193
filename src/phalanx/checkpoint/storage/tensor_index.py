"""What one role of a group has saved, as values: which tensor and which value lies where in which file. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.errors import CheckpointCorrupted
from phalanx.weights.planning.boxes import Box

__all__ = ["CATALOGUE", "Catalogue", "Path", "Piece", "StoredTensor", "StoredValue"]

CATALOGUE = "catalogue.json"
"""Name of its file, beside those of the ranks."""

Path = tuple[str | int | tuple[str, int], ...]
"""Where a leaf lies in a state: keys of dicts, and ("list", index) within lists, ("tuple", index) within tuples."""


class Piece(NamedTuple):
    """One item in a file of a rank, as torch's distributed checkpoint writes them.

    Attributes:
        file: its name, beside the catalogue.
        offset, length: of the item, in bytes.
        data: where the elements of a tensor begin in the file, in row-major order; -1 where that is not known.
        digest: of the elements where ``data`` is known, of the whole item else (xxh3, 64 bits).
        box: of a tensor; None of a value.
    """

    file: str
    offset: int
    length: int
    data: int
    digest: str
    box: Box | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor: its pieces cover it, and do not overlap. ``ranks`` had part of it; None: all."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StoredValue:
    """A value: equal on all ``ranks`` that have it (None: all), or one for each of them."""

    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...] | None = None
    by_rank: bool = False

    def of(self, rank: int, world_size: int) -> Piece | None:
        """That of ``rank``; None where it has none."""
        everyone = tuple(range(world_size)) if self.ranks is None else self.ranks
        if rank not in everyone:
            return None
        return self.pieces[everyone.index(rank)] if self.by_rank else self.pieces[0]


@dataclass(frozen=True)
class Catalogue:
    """All that a role has saved, by key; ``paths`` says where each key lies in the state."""

    world_size: int
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    values: Mapping[str, StoredValue] = field(default_factory=dict[str, StoredValue])
    paths: Mapping[str, Path] = field(default_factory=dict[str, Path])

    @property
    def nbytes(self) -> int:
        """Of all items."""
        tensors = sum(piece.length for one in self.tensors.values() for piece in one.pieces)
        return tensors + sum(piece.length for one in self.values.values() for piece in one.pieces)

    def parts(self) -> tuple[str, ...]:
        """The outermost keys of the state."""
        return tuple(sorted({str(path[0]) for path in self.paths.values() if path}))

    def to_bytes(self) -> bytes:
        """As a file."""
        content: dict[str, Any] = {
            "world_size": self.world_size,
            "tensors": {
                key: [one.dtype, one.shape, one.ranks, one.pieces] for key, one in self.tensors.items()
            },
            "values": {key: [one.by_rank, one.ranks, one.pieces] for key, one in self.values.items()},
            "paths": self.paths,
        }
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str = CATALOGUE) -> Catalogue:
        """What :meth:`to_bytes` gave.

        Raises:
            CheckpointCorrupted: it is not.
        """
        try:
            content = json.loads(data)
            return cls(
                content["world_size"],
                {
                    key: StoredTensor(dtype, tuple(shape), tuple(map(_piece, pieces)), _ranks(ranks))
                    for key, (dtype, shape, ranks, pieces) in content["tensors"].items()
                },
                {
                    key: StoredValue(tuple(map(_piece, pieces)), _ranks(ranks), by_rank)
                    for key, (by_rank, ranks, pieces) in content["values"].items()
                },
                {key: tuple(map(_step, path)) for key, path in content["paths"].items()},
            )
        except (ValueError, KeyError, TypeError):
            raise CheckpointCorrupted(f"{where} is damaged: it is not a catalogue", files=(where,)) from None


def _piece(given: list[Any]) -> Piece:
    file, offset, length, data, digest, box = given
    where = None if box is None else Box(tuple(box[0]), tuple(box[1]))
    return Piece(file, offset, length, data, digest, where)


def _ranks(given: list[int] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(given)


def _step(given: Any) -> Any:
    return (str(given[0]), int(given[1])) if isinstance(given, list) else given
