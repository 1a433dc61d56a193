"""Notices of draining nodes for the groups of this process."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.backends.backend_types import Backend, DrainingNode
from phalanx.session.background import Background
from phalanx.session.session import session
from phalanx.topology.slots import SlotInfo

LOOK_EVERY_S = 0.5
_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class PreemptionNotice:
    """Notice that some ranks of a group will lose their node.

    ``node`` is the node's id. ``deadline`` is a Unix time in seconds; None if it is not known. ``reason`` is a text.
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


class NoticeQueue:
    """The notices of a group. Each is returned once by ``px.preemption_notices`` and passed once to ``on_notice``.

    A node that was announced as draining stays so for ever: later losses of its ranks are not failures of the group.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()
        #: The draining nodes, with their deadlines and the ranks that were announced.
        self._draining: dict[str, tuple[float | None, frozenset[int]]] = {}
        self._notices: list[PreemptionNotice] = []
        self._taken = Counter[str]()  # number of notices taken, by reader
        #: True if the code that moves ranks has not handled a notice yet.
        self.urgent = False

    def see(self, draining: Sequence[DrainingNode], slots: Sequence[SlotInfo]) -> None:
        """Record the draining nodes that the cluster reports now; ``slots`` has the slot of each rank.

        A notice is new if its node, its deadline or a rank on that node is new.
        """
        with self._lock:
            for node in draining:
                here = tuple(rank for rank, slot in enumerate(slots) if slot.node_id == node.node_id)
                deadline, known = self._draining.setdefault(node.node_id, (None, frozenset[int]()))
                if here and (deadline != node.deadline or not known.issuperset(here)):
                    self._draining[node.node_id] = node.deadline, known.union(here)
                    place = node.node_id, slots[here[0]].host
                    self._notices.append(
                        PreemptionNotice(self._group, here, *place, node.deadline, node.reason)
                    )
                    self.urgent = True

    def take(self, reader: str = "px.preemption_notices") -> list[PreemptionNotice]:
        """Return the notices that a reader has not taken yet, in order."""
        with self._lock:
            first, self._taken[reader] = self._taken[reader], len(self._notices)
            return self._notices[first:]

    def ranks_to_move(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks whose node is draining; ``nodes`` has the node of each rank."""
        with self._lock:
            return tuple(rank for rank, node in enumerate(nodes) if node in self._draining)

    def explains(self, nodes: Sequence[str]) -> bool:
        """Return whether the ranks on these nodes (at least one node) were lost because their nodes were drained."""
        with self._lock:
            return bool(nodes) and self._draining.keys() >= {*nodes}


def look_once(group: Any) -> None:
    """Record the draining and the ended nodes for a ``Group``; queries the cluster, which takes some milliseconds."""
    group.notices.see(group.backend.draining_nodes(ended=True), _slots(group))


def turn() -> float | None:
    """Query each cluster once for all groups, and call their ``on_notice``. Return the seconds until the next turn."""
    groups = [one for one in session.groups() if one.has_pool and not one.closed]
    draining = {backend: _draining(backend) for backend in {group.backend for group in groups}}
    for group in groups:
        group.notices.see(draining[group.backend], _slots(group))
        for notice in group.notices.take("on_notice"):
            _log.warning("%s", notice)
            try:
                if group.options.on_notice is not None:
                    group.options.on_notice(notice)
            except BaseException:  # SystemExit would end the thread, and with it all notices
                _log.exception("on_notice of group %r raised, and the group continues", group.name)
    return LOOK_EVERY_S if any(not backend.immediate for backend in draining) else None


def _slots(group: Any) -> list[SlotInfo]:
    return [endpoint.facts.slot for endpoint in group.epoch.endpoints]


def _draining(backend: Backend) -> Sequence[DrainingNode]:
    try:
        return backend.draining_nodes()
    except Exception:  # the backend is shutting down, which the monitor reports
        _log.debug("asking for draining nodes failed", exc_info=True)
        return ()


looks = Background(turn)
"""Looks for draining nodes in the background, until no group of this process is open."""
