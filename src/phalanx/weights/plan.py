"""The resharding plan of a sync: which box of which tensor goes from which source rank to which target ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from phalanx.display.byte_format import size
from phalanx.display.tables import Table
from phalanx.weights.boxes import Box, volume
from phalanx.weights.manifest import DTYPE_BYTES

_MOST_NAMED = 4


class Locality(IntEnum):
    """The distance between two ranks, nearest first. It decides the replica that is read, and the transport."""

    PROCESS = 0
    NODE = 1
    REMOTE = 2

    def __str__(self) -> str:
        return ("same process", "same node", "other node")[self]


class RankLocation(NamedTuple):
    """The place of a rank. Two ranks have one ``node`` only if they can share memory.

    ``device`` identifies the physical CUDA device that has the rank's tensors; "" if they are in host memory.
    """

    node: str
    process: str
    device: str = ""


class Locations(NamedTuple):
    """The locations of both sides, by rank."""

    sources: tuple[RankLocation, ...]
    targets: tuple[RankLocation, ...]


class Pair(NamedTuple):
    """A tensor's name on both sides."""

    source: str
    target: str


class TransferBox(NamedTuple):
    """A box that is sent once from ``source`` to all of ``targets``.

    ``box`` has coordinates of the global tensor, or of the part of a fused tensor. ``source_at`` and ``target_at``
    are its positions in the local tensors.
    """

    source: int
    targets: tuple[int, ...]
    locality: Locality
    box: Box
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]


@dataclass(frozen=True)
class TensorBatch:
    """Tensors that are sent alike: each of ``pairs`` in each of ``boxes``, cast from ``source_dtype`` to ``dtype``."""

    source_dtype: str
    dtype: str
    pairs: tuple[Pair, ...]
    boxes: tuple[TransferBox, ...]

    def nbytes(self, box: TransferBox) -> int:
        """Return the bytes of ``box`` of a pair, as sent."""
        return volume(box.box) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """All transfers of a sync. Equal manifests and locations lead to an equal plan.

    Attributes:
        batches: in the order in which all ranks work.
        copies: (name, its twin) at the target. The twin is copied from the name after the transfer.
        ties: (name, name of its storage) at the target. It arrives with the other name.
        surplus: names of the source that no target takes.
        sources, targets: number of ranks of each side.
    """

    batches: tuple[TensorBatch, ...]
    copies: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    surplus: tuple[str, ...]
    sources: int
    targets: int

    def of(self, *, source: int | None = None, target: int | None = None) -> Plan:
        """Return the part of the plan that concerns a rank, in the same order."""
        batches: list[TensorBatch] = []
        for batch in self.batches:
            boxes = tuple(box for box in batch.boxes if box.source == source or target in box.targets)
            if boxes:
                batches.append(TensorBatch(batch.source_dtype, batch.dtype, batch.pairs, boxes))
        copies, ties = (self.copies, self.ties) if target is not None else ((), ())
        return Plan(tuple(batches), copies, ties, (), self.sources, self.targets)

    def transfers(
        self, localities: Sequence[Locality] | None = None
    ) -> Iterator[tuple[TensorBatch, Pair, TransferBox]]:
        """Yield every box of every tensor, in the order in which all ranks work."""
        for batch in self.batches:
            boxes = [box for box in batch.boxes if localities is None or box.locality in localities]
            for pair in batch.pairs if boxes else ():
                for box in boxes:
                    yield batch, pair, box

    def boxes(self, localities: Sequence[Locality]) -> Iterator[TransferBox]:
        """Yield the boxes of some localities, once for all tensors that are sent alike."""
        for batch in self.batches:
            yield from (box for box in batch.boxes if box.locality in localities)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that arrive, summed over the target ranks, without copies and ties."""
        return sum(
            batch.nbytes(box) * len(box.targets) * len(batch.pairs)
            for batch in self.batches
            for box in batch.boxes
        )


def bytes_by_link(plan: Plan) -> dict[tuple[int, int, Locality], int]:
    """Return the bytes from each source rank to each target rank, by locality."""
    links: dict[tuple[int, int, Locality], int] = defaultdict(int)
    for batch in plan.batches:
        for box in batch.boxes:
            for target in box.targets:
                links[box.source, target, box.locality] += batch.nbytes(box) * len(batch.pairs)
    return dict(sorted(links.items()))


def explain_plan(
    plan: Plan, transports: Mapping[Locality, str], *, delta_base: int = 0, title: str = "weights"
) -> Table:
    """Return a table with a row for each pair of ranks, and notes.

    Args:
        transports: the transport of each locality.
        delta_base: bytes of the copies that sources keep for deltas; 0 without deltas.
    """
    rows = tuple(
        (f"rank {source}", f"rank {target}", str(locality), transports[locality], size(nbytes))
        for (source, target, locality), nbytes in bytes_by_link(plan).items()
    )
    count = len({pair.target for batch in plan.batches for pair in batch.pairs})
    return Table(
        f"{title}: {size(plan.nbytes)} to {plan.targets} ranks, {count} tensors",
        ("from", "to", "locality", "transport", "bytes"),
        rows,
        tuple(_notes(plan, delta_base)),
    )


def _notes(plan: Plan, delta_base: int) -> list[str]:
    sums: dict[Locality, int] = defaultdict(int)
    for (_, _, locality), nbytes in bytes_by_link(plan).items():
        sums[locality] += nbytes
    totals = ", ".join(f"{locality} {size(sums[locality])}" for locality in sorted(sums))
    notes = [f"by locality: {totals or 'nothing'}"]
    casts: dict[str, int] = defaultdict(int)
    for batch in plan.batches:
        if batch.source_dtype != batch.dtype:
            casts[f"{batch.source_dtype} to {batch.dtype}"] += len({pair.target for pair in batch.pairs})
    renamed = sorted({pair for batch in plan.batches for pair in batch.pairs if pair.source != pair.target})
    once = [f"{twin} = {name} (copied there)" for name, twin in plan.copies]
    once += [f"{alias} = {name} (one storage there)" for alias, name in plan.ties]
    if casts:
        notes.append("cast at the source: " + ", ".join(f"{kind} ({n} tensors)" for kind, n in casts.items()))
    if renamed:
        notes.append(f"renamed or fused: {_few([f'{pair.source} -> {pair.target}' for pair in renamed])}")
    if once:
        notes.append(f"tied, sent once: {_few(once)}")
    if plan.surplus:
        notes.append(f"not taken by the target: {_few(list(plan.surplus))}")
    if delta_base:
        notes.append(f"deltas: the sources keep one more copy of what they send, {size(delta_base)}")
    return notes


def _few(items: list[str]) -> str:
    rest = f", and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + rest
