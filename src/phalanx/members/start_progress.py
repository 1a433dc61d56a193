"""Shows the progress of a group's start, if it takes more than a few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phalanx.backends.backend_types import Backend, Endpoint
from phalanx.display.progress import bar, place, terminal, waiting_nodes

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_S = 2.0
_LOOK_EVERY_S = 0.25
_STACKS_EVERY_S = 5.0
"""Seldom: each time a thread of each rank writes the stacks of all its threads."""


class Starting:
    """Context in which a group starts; shows the progress in a terminal or notebook."""

    def __init__(self, backend: Backend, group: str, world_size: int, console: Console | None = None) -> None:
        self._backend = backend
        self._group = group
        self._world_size = world_size
        self._endpoints: Sequence[Endpoint] = ()
        self._hosts: Sequence[str] = ()
        self._refs: Sequence[Any] = ()
        self._console = console
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0.0
        self._now = ""

    def __enter__(self) -> Starting:
        if self._backend.immediate:
            return self
        self._console = self._console or terminal()
        if self._console is not None:
            self._thread = threading.Thread(target=self._show, name="phalanx-starting", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def watch(self, endpoints: Sequence[Endpoint], refs: Sequence[Any]) -> None:
        """Show, now that the processes exist, which of their constructors have returned; ``refs`` are their results."""
        self._endpoints = endpoints
        self._hosts = [endpoint.facts.slot.host for endpoint in endpoints]
        self._refs = refs

    def _show(self) -> None:
        if self._over.wait(PATIENCE_S) or self._console is None:
            return
        with bar(self._console, transient=True) as shown:
            task = shown.add_task(
                f"starting {self._group}", total=self._world_size, now="waiting for processes"
            )
            while not self._over.wait(_LOOK_EVERY_S):
                ready, now = self.look()
                shown.update(task, completed=ready, now=now)

    def look(self) -> tuple[int, str]:
        """Return the number of ready ranks, and the activity of a rank that is not ready."""
        if not self._refs:
            return 0, "waiting for processes"
        try:
            waiting = self._backend.wait(self._refs, len(self._refs), 0)[1]
            if waiting and time.monotonic() - self._asked > _STACKS_EVERY_S:
                self._asked = time.monotonic()
                self._now = self._doing(waiting[0])
        except Exception:  # of the backend, while the start fails: the start itself tells
            return 0, ""
        if not waiting:
            return len(self._refs), ""
        nodes = waiting_nodes(self._hosts, waiting)
        return len(self._refs) - len(waiting), f"{nodes}; {self._now}" if nodes else self._now

    def _doing(self, rank: int) -> str:
        sight = self._backend.sights([self._endpoints[rank]], stacks=True)[0]
        where = place(sight.stack) or sight.note
        return f"rank {rank}: {where}" if where else f"waiting for rank {rank}"
