"""Shows the progress of a group's start, if it takes more than a few seconds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phalanx.backends.backend_types import Backend, Endpoint
from phalanx.display.progress import bar, place, terminal, waiting_nodes

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE_S = 2.0
_LOOK_EVERY_S = 1.0


class Starting:
    """Context in which a group starts; shows the progress in a terminal or notebook."""

    def __init__(self, backend: Backend, group: str, world_size: int) -> None:
        self._backend = backend
        self._group = group
        self._world_size = world_size
        self._endpoints: Sequence[Endpoint] = ()
        self._refs: Sequence[Any] = ()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Starting:
        console = None if self._backend.immediate else terminal()
        if console is not None:
            self._thread = threading.Thread(
                target=self._show, args=(console,), name="phalanx-starting", daemon=True
            )
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
        self._endpoints, self._refs = endpoints, refs

    def _show(self, console: Console) -> None:
        if self._over.wait(PATIENCE_S):
            return
        with bar(console, transient=True) as shown:
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
            if not waiting:
                return len(self._refs), ""
            rank = waiting[0]
            sight = self._backend.sights([self._endpoints[rank]], stacks=True)[0]
        except Exception:  # of the backend, while the start fails: the start itself tells
            return 0, ""
        where = place(sight.stack) or sight.note
        nodes = waiting_nodes([endpoint.facts.slot.host for endpoint in self._endpoints], waiting)
        doing = f"rank {rank}: {where}" if where else f"waiting for rank {rank}"
        return len(self._refs) - len(waiting), f"{nodes}; {doing}" if nodes else doing
