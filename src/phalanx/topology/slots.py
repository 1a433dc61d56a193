"""Slots of a pool, and views that select, split and join slots."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.config import as_integer, is_whole
from phalanx.errors import DeclarationError


@dataclass(frozen=True)
class Slot:
    """The place of a rank: number ``bundle`` in block number ``block`` of a pool, both from 0."""

    block: int
    bundle: int
    pool: str

    def __str__(self) -> str:
        return f"slot {self.bundle} of block {self.block} of pool {self.pool!r}"


@dataclass(frozen=True)
class SlotInfo:
    """Report of a process about its slot, with accelerator ids as the node's runtime names them.

    ``threads`` is the ``OMP_NUM_THREADS`` that the process was started with, if the user set it.
    """

    node_id: str
    host: str
    node_ip: str
    accelerator_ids: tuple[str, ...] = ()
    cpus_of_node: int | None = None
    threads: str | None = None


@dataclass(frozen=True)
class SlotView:
    """Slots in rank order: rank ``r`` runs on ``view.slots[r]``.

    Consecutive slots of the same block form a local block: they share a node, and ``local_ranks`` count within it.

    Raises:
        DeclarationError: if there are no slots, or the same slot twice.
    """

    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if not self.slots:
            raise DeclarationError("a pool view without slots; expected at least one slot")
        if twice := [slot for slot, count in Counter(self.slots).items() if count > 1]:
            raise DeclarationError(
                f"{twice[0]} is in the view twice; each slot holds one rank of a group, so merge pools or views "
                "that share no slot"
            )

    @property
    def world_size(self) -> int:
        """Number of slots, and of ranks of a group on the slots."""
        return len(self.slots)

    @cached_property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each local block: runs of consecutive slots of the same block and pool."""
        runs = itertools.groupby(enumerate(self.slots), key=lambda place: (place[1].pool, place[1].block))
        return tuple(tuple(rank for rank, _ in run) for _, run in runs)

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Index in the local block, by rank."""
        return tuple(i for block in self.blocks for i in range(len(block)))

    @cached_property
    def local_world_sizes(self) -> tuple[int, ...]:
        """Number of slots of the local block, by rank."""
        return tuple(len(block) for block in self.blocks for _ in block)

    def split(self, sizes: int | Sequence[int]) -> tuple[SlotView, ...]:
        """Return views of consecutive slots: of ``sizes`` slots each if it is an integer, of these sizes if a list.

        Raises:
            DeclarationError: if the sizes do not add up to the number of slots.
        """
        slots = iter(self.slots)
        return tuple(
            SlotView(tuple(itertools.islice(slots, count))) for count in _part_sizes(sizes, self.world_size)
        )

    def __add__(self, other: SlotView) -> SlotView:
        """Return a view of the slots of this view, then of the other, in this order of ranks.

        Raises:
            DeclarationError: if a slot is in both views; names the slot.
        """
        return SlotView(self.slots + other.slots)

    def __getitem__(self, key: int | slice) -> SlotView:
        """Return a view of a single slot or of a slice, with negative indices and steps as in a list.

        Raises:
            DeclarationError: if the slice is empty, the index is outside the view, or the key has another type.
        """
        if isinstance(key, slice):
            return SlotView(self._sliced(key))
        if not is_whole(key):
            raise DeclarationError(
                f"pool[{key!r}]: expected a slot's number or a slice, such as pool[0] or pool[0:4]"
            )
        if not -len(self.slots) <= key < len(self.slots):
            raise DeclarationError(
                f"pool[{key}]: the pool has {len(self.slots)} slots; expected {-len(self.slots)} to "
                f"{len(self.slots) - 1}"
            )
        return SlotView((self.slots[key],))

    def _sliced(self, key: slice) -> tuple[Slot, ...]:
        bounds = (key.start, key.stop, key.step)
        text = ":".join("" if b is None else str(b) for b in (bounds if key.step is not None else bounds[:2]))
        if key.step == 0 or any(b is not None and not is_whole(b) for b in bounds):
            raise DeclarationError(f"pool[{text}]: expected whole numbers and a step other than 0")
        if not self.slots[key]:
            raise DeclarationError(
                f"pool[{text}] of a pool of {len(self.slots)} slots is empty; expected bounds that keep at "
                "least one slot"
            )
        return self.slots[key]


def slots_of(block_sizes: Sequence[int], pool: str) -> SlotView:
    """Return a view of all slots of the pool ``pool``, whose blocks have these sizes, block by block."""
    return SlotView(tuple(Slot(b, i, pool) for b, count in enumerate(block_sizes) for i in range(count)))


def order_ranks(slots: Sequence[Slot], accelerators: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the stable rank order: ``order[rank]`` is the index in ``slots`` of the slot of ``rank``.

    Local blocks keep their order. Within a block, slots are sorted by accelerator id (numbers first, then names such as
    UUIDs); slots without accelerators, and ties, keep their order. ``accelerators`` are ids by slot.
    """
    order: list[int] = []
    for block in SlotView(tuple(slots)).blocks:
        order += sorted(block, key=lambda i: id_key(accelerators[i]))
    return tuple(order)


def id_key(ids: Sequence[str]) -> tuple[tuple[int, int, str], ...]:
    """Return the sort key of accelerator ids: numbers by value, then names by text."""
    return tuple((0, int(i), "") if i.isascii() and i.isdigit() else (1, 0, i) for i in ids)


def checked_shape(given: Any) -> tuple[int, ...]:
    """Return the sizes of a pool's blocks as integers: ``[4, 2]`` is a block of 4 slots and a block of 2 slots.

    Raises:
        DeclarationError: if ``given`` is not a non-empty list of positive integers.
    """
    advice = (
        "expected a list of positive whole numbers, one per block: [4] is one block of 4, [8, 8] two of 8"
    )
    if is_whole(given):
        raise DeclarationError(f"process_on_nodes={given!r} is a single number; {advice}. Write [{given}]")
    if isinstance(given, bool | str | bytes | dict) or not hasattr(given, "__iter__"):
        raise DeclarationError(f"process_on_nodes={given!r}; {advice}")
    counts = tuple(given)
    if not counts:
        raise DeclarationError(f"process_on_nodes={given!r} has no blocks; {advice}")
    for count in counts:
        if not is_whole(count, 1):
            raise DeclarationError(
                f"process_on_nodes={given!r}: {count!r} is not a positive whole number; {advice}"
            )
    return tuple(map(int, counts))


def _part_sizes(sizes: int | Sequence[int], world_size: int) -> tuple[int, ...]:
    if (size := as_integer(sizes)) is not None:
        if size < 1 or world_size % size:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise DeclarationError(
                f"split({size}): parts of {size} slots do not divide a pool of world size {world_size}; "
                f"give one of {divisors}, or a list of sizes that adds up to {world_size}"
            )
        return (size,) * (world_size // size)
    counts = tuple(sizes) if isinstance(sizes, list | tuple) else ()
    if not counts or not all(is_whole(n, 1) for n in counts):
        raise DeclarationError(
            f"split({sizes!r}): expected the size of each part as a number, or a list of positive whole "
            f"numbers that adds up to the pool's world size {world_size}"
        )
    if sum(counts) != world_size:
        raise DeclarationError(
            f"split({list(counts)}): the sizes add up to {sum(counts)}, but the pool's world size is "
            f"{world_size}; every slot belongs to exactly one part"
        )
    return tuple(map(int, counts))
