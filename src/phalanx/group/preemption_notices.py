"""Draining nodes, as a group sees them, and which notices were delivered already. Pure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.backends.backend_types import DrainingNode


@dataclass(frozen=True)
class PreemptionNotice:
    """Some ranks of a group will lose their node.

    ``deadline`` is a Unix time in seconds; None if it is not known. ``reason`` is a text.
    """

    group: str
    ranks: tuple[int, ...]
    node: str
    host: str
    deadline: float | None
    reason: str

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {list(self.ranks)}"
        return f"group {self.group!r}, {ranks} on {self.host} (node {self.node[:8]}): {self.reason}"


@dataclass(frozen=True)
class Seat:
    """Where the process of a rank is."""

    node: str
    host: str


class NoticeQueue:
    """The notices of a group. Each is returned once by ``px.preemption_notices`` and passed once to ``on_notice``.

    A node that was announced as draining stays so for ever: later failures of its ranks are not attributed to them.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._going: dict[str, DrainingNode] = {}
        self._told: dict[str, tuple[float | None, frozenset[int]]] = {}
        self._untold: list[PreemptionNotice] = []
        self._uncalled: list[PreemptionNotice] = []
        #: True if the code that moves ranks has not handled a notice yet.
        self.urgent = False

    def see(self, going: Sequence[DrainingNode], seats: Sequence[Seat]) -> None:
        """Record the draining nodes that the cluster reports now; ``seats`` are the locations of the ranks, by rank.

        A notice is new if its node, its deadline or a rank on that node is new.
        """
        with self._lock:
            for node in going:
                self._going[node.node_id] = node
                here = [rank for rank, seat in enumerate(seats) if seat.node == node.node_id]
                deadline, known = self._told.get(node.node_id, (None, frozenset[int]()))
                if not here or (known.issuperset(here) and deadline == node.deadline):
                    continue
                self._told[node.node_id] = node.deadline, known.union(here)
                notice = PreemptionNotice(
                    self._group,
                    tuple(here),
                    node.node_id,
                    seats[here[0]].host,
                    node.deadline,
                    node.reason,
                )
                self._untold.append(notice)
                self._uncalled.append(notice)
                self.urgent = True

    def take(self) -> list[PreemptionNotice]:
        """Return the notices that were not taken yet, in order."""
        with self._lock:
            found, self._untold = self._untold, []
            return found

    def take_uncalled(self) -> list[PreemptionNotice]:
        """The notices that ``on_notice`` has not got yet, in order."""
        with self._lock:
            found, self._uncalled = self._uncalled, []
            return found

    def ranks_to_move(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks whose node is draining; ``nodes`` is by rank."""
        with self._lock:
            return tuple(rank for rank, node in enumerate(nodes) if node in self._going)

    def explains(self, nodes: Sequence[str]) -> bool:
        """Return whether the ranks on these nodes (at least one node) were lost because their nodes were drained."""
        with self._lock:
            return bool(nodes) and all(node in self._going for node in nodes)
