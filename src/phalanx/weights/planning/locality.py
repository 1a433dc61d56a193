"""How near two ranks are to each other: what decides which replica a target reads, and which mover carries it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Hop", "Place", "Places"]


class Hop(IntEnum):
    """The distance that a piece travels, nearest first."""

    PROCESS = 0
    NODE = 1
    OTHER = 2

    def __str__(self) -> str:
        return ("same process", "same node", "other node")[self]


class Place(NamedTuple):
    """Where a rank is. Two ranks have one ``node`` only if shared memory reaches from one to the other."""

    node: str
    process: str


class Places(NamedTuple):
    """The places of both sides, by rank."""

    sources: tuple[Place, ...]
    targets: tuple[Place, ...]

    @classmethod
    def apart(cls, sources: int, targets: int) -> Places:
        """Every rank on a node of its own."""
        return cls(_alone("source", sources), _alone("target", targets))

    @classmethod
    def one_node(cls, sources: int, targets: int) -> Places:
        """All ranks on one node, each a process of its own."""
        ours = tuple(Place("node", f"source {rank}") for rank in range(sources))
        return cls(ours, tuple(Place("node", f"target {rank}") for rank in range(targets)))

    @classmethod
    def shared(cls, processes: int, ranks_per_node: int | None = None) -> Places:
        """Source ``i`` and target ``i`` are roles of one process."""
        per_node = ranks_per_node or processes
        both = tuple(Place(f"node {rank // per_node}", f"process {rank}") for rank in range(processes))
        return cls(both, both)


def _alone(side: str, count: int) -> tuple[Place, ...]:
    return tuple(Place(f"{side} {rank}", f"{side} {rank}") for rank in range(count))


def nodes_of(places: Sequence[Place], ranks: Sequence[int]) -> dict[str, list[int]]:
    """``ranks`` by the node that they are on, in order."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(places[rank].node, []).append(rank)
    return found
