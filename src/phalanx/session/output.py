"""Output of chosen ranks on the driver: a thread polls their files, and prints full lines with a prefix."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from phalanx.backends.backend_types import Backend, Endpoint
from phalanx.config import Shown
from phalanx.display.log_merging import Lines, Merged
from phalanx.session.background import Background

LOOK_EVERY_S = 0.1
_WINDOW_S = 0.5  # equal lines of several ranks within this time are merged
_SHARE = 10  # polling may use a tenth of the time, so files on other nodes are polled less often


class RankOutput:
    """The output file of a rank, whose lines are added to its ``group``.

    It does not hold the process's handle, since a process ends when its last handle is dropped.
    """

    def __init__(self, backend: Backend, endpoint: Endpoint, rank: int, group: Merged) -> None:
        self.files = endpoint.facts.files
        self.group = group
        self._rank = rank
        self._place = replace(endpoint, handle=None)
        self._handle = weakref.ref(endpoint.handle)
        self._backend = backend
        self._lines = Lines(partial(_read, backend, self._place))
        self._lock = threading.Lock()

    def look(self, last: bool = False) -> bool:
        """Read new output. Return False if the process has ended, or if this is the ``last`` read."""
        with self._lock:
            last = last or not self._is_alive()  # before reading: a dead process writes no more
            self.group.add(self._rank, self._lines.new(last=last), time.monotonic())
            return not last

    def _is_alive(self) -> bool:
        handle = self._handle()
        try:
            return handle is not None and not self._backend.dead_of([replace(self._place, handle=handle)])
        except Exception:  # the backend is shut down
            return False


def _read(backend: Backend, place: Endpoint, offset: int, limit: int) -> bytes:
    """Return bytes of a rank's file; none if it is not there yet, or its node was lost, which is harmless."""
    if path := place.facts.log:
        with contextlib.suppress(Exception):
            return backend.read(place, path, offset, limit)
    return b""


class Display:
    """The ranks whose output this process shows."""

    def __init__(self) -> None:
        self._sources: list[RankOutput] = []
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._background = Background(self._turn)

    def begin(
        self, backend: Backend, endpoints: Sequence[Endpoint], ranks: Sequence[int], label: str, shown: Shown
    ) -> None:
        """Show the output of the chosen ones of these ``ranks`` from now on; ``endpoints`` are those of all ranks."""
        if backend.immediate:
            return  # they print to this process's own terminal
        hosts = [endpoint.facts.slot.host for endpoint in endpoints]
        group = Merged(label, hosts, _WINDOW_S if shown == "merged" else 0.0)
        sources = [
            RankOutput(backend, endpoints[rank], rank, group)
            for rank in ranks
            if isinstance(shown, str) or rank in shown
        ]
        if not sources:
            return
        with self._lock:
            self._sources += sources
        atexit.unregister(self.finish)
        atexit.register(self.finish)
        self._background.begin()

    def finish(self, endpoints: Sequence[Endpoint] | None = None) -> None:
        """Show the remaining output of these ranks (default: all), and stop polling them."""
        files = None if endpoints is None else {endpoint.facts.files for endpoint in endpoints}
        with self._lock:
            ended = [one for one in self._sources if files is None or one.files in files]
        self._show(ended, last=True)

    def _turn(self) -> float | None:
        begun = time.monotonic()
        with self._lock:
            sources = list(self._sources)
        self._show(sources)
        return max(LOOK_EVERY_S, _SHARE * (time.monotonic() - begun)) if self._sources else None

    def _show(self, sources: Sequence[RankOutput], *, last: bool = False) -> None:
        """Show new output of the sources, and all lines of groups without other sources. Stop polling ended sources."""
        gone = [source for source in sources if not source.look(last)]
        with self._lock:
            self._sources = [source for source in self._sources if source not in gone]
            there = {source.group for source in self._sources}
        self._write({source.group for source in gone} - there, None)
        self._write(there, time.monotonic())

    def _write(self, groups: set[Merged], now: float | None) -> None:
        """Write the lines of groups that are due at ``now``; None: all lines."""
        with self._writing:
            text = "".join(f"{line}\n" for group in groups for line in group.take(now))
            if text:
                encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # may lack some characters
                with contextlib.suppress(ValueError, OSError):  # the driver has closed its stdout
                    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
                    sys.stdout.flush()
