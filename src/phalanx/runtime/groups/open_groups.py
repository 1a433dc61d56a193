"""All groups of this process: what one call needs to know of the others."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from phalanx.runtime.calls.under_way import CallsUnderWay
from phalanx.runtime.life.epoch import GroupLife
from phalanx.transport.base import Transport


class OpenGroup(Protocol):
    """A group of this process."""

    life: GroupLife
    under_way: CallsUnderWay


class OpenGroups:
    """The groups that somebody holds."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[OpenGroup] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, group: OpenGroup) -> None:
        """Note a group."""
        with self._lock:
            self._groups.add(group)

    def _now(self) -> list[OpenGroup]:
        with self._lock:
            return list(self._groups)

    def on_several_nodes(self, transport: Transport) -> bool:
        """Whether not all ranks that this process calls can read each other's outputs where they lie."""
        nodes: set[str] = set()
        for group in self._now():
            life = group.life
            if life.transport is transport and not life.closed:
                nodes |= life.epoch.nodes
        return len(nodes) > 1

    def wait_for_a_call(self, seconds: float) -> bool:
        """Wait for a rank to end a call, of any group; False if there is none under way."""
        for group in self._now():
            for call in group.under_way.calls():
                everyone = range(len(call.plan.ranks))
                pending = call.arrivals.wait(everyone, len(everyone), 0)[1]
                if pending:
                    call.arrivals.wait(pending, 1, seconds)
                    return True
        return False


open_groups = OpenGroups()
