"""Prints the output of chosen ranks on the driver: a thread polls their files, and writes full lines with a prefix."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.config import Shown
from phalanx.display.log_merging import Lines, Merged, prefix_of
from phalanx.session.background import Background

LOOK_EVERY_S = 0.1
_CHUNK = 256 * 1024
_SHARE = 10  # a look may take a tenth of the time: files on other nodes are read less often


class RankOutput:
    """The output file of a rank, and the offset up to which it was shown.

    It does not hold the process's handle, since a process ends when its last handle is dropped.
    """

    def __init__(
        self,
        backend: Backend,
        endpoint: Endpoint,
        write: Callable[[Sequence[str]], None],
        together: Together | None = None,
    ) -> None:
        self.files = endpoint.facts.files
        self.together = together
        self._place = replace(endpoint, handle=None)
        self._handle = weakref.ref(endpoint.handle)
        self._backend = backend
        self._write = write
        self._lines = Lines()
        self._offset = 0
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Show new output; return False once the process has ended and all of its output is shown."""
        with self._lock:
            alive = self._alive()  # before reading: all output of a dead process is there now
            self._show(self._lines.feed(data) for data in self._new())
            if not alive:
                self._show([self._lines.finish()])
            return alive

    def finish(self) -> None:
        """Show all that there is."""
        with self._lock:
            self._show(self._lines.feed(data) for data in self._new())
            self._show([self._lines.finish()])

    def _alive(self) -> bool:
        handle = self._handle()
        try:
            return handle is not None and not self._backend.dead_of([replace(self._place, handle=handle)])
        except Exception:  # the backend is shut down
            return False

    def _new(self) -> list[bytes]:
        """Return output written since the last call; at least one chunk, perhaps empty."""
        path, found = self._place.facts.log, list[bytes]()
        while path:
            try:
                data = self._backend.read(self._place, path, self._offset, _CHUNK)
            except Exception:  # not there yet, or its node was lost: failing to read logs is harmless
                data = b""
            found.append(data)
            self._offset += len(data)
            if len(data) < _CHUNK:
                break
        return found or [b""]

    def _show(self, batches: Iterable[list[str]]) -> None:
        lines = [line for batch in batches for line in batch]
        if lines:
            self._write(lines)


def _written(lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if text:
        with contextlib.suppress(ValueError, OSError):  # the driver has closed its stdout
            sys.stdout.write(text)
            sys.stdout.flush()


def _behind(prefix: str) -> Callable[[Sequence[str]], None]:
    """Return the function that writes the lines of a rank."""
    return lambda lines: _written(prefix + line for line in lines)


class Together:
    """Output of the ranks of a group, with equal lines of several ranks shown as a single line."""

    def __init__(self, label: str, hosts: Sequence[str]) -> None:
        self._merged = Merged(label, hosts)
        self._lock = threading.Lock()

    def of(self, rank: int) -> Callable[[Sequence[str]], None]:
        """Return the function that takes the lines of a rank."""

        def write(lines: Sequence[str]) -> None:
            with self._lock:
                self._merged.add(rank, lines, time.monotonic())

        return write

    def flush(self, *, everything: bool = False) -> None:
        """Write lines that have waited long enough for other ranks to print the same."""
        with self._lock:
            _written(self._merged.take(None if everything else time.monotonic()))


class Display:
    """All ranks whose output this process shows."""

    def __init__(self) -> None:
        self._sources: list[RankOutput] = []
        self._lock = threading.Lock()
        self._background = Background(self._turn, finish=self.finish)

    def begin(self, backend: Backend, endpoints: Sequence[Endpoint], label: str, shown: Shown) -> None:
        """Show the output of the chosen ranks from now on; ``endpoints`` are by rank."""
        if backend.immediate:
            return  # they print to this process's own terminal
        everyone = range(len(endpoints))
        chosen = everyone if isinstance(shown, str) else [rank for rank in shown if rank in everyone]
        hosts = [endpoint.facts.slot.host for endpoint in endpoints]
        together = Together(label, hosts) if shown == "merged" else None
        sources = [
            RankOutput(
                backend,
                endpoints[rank],
                together.of(rank) if together else _behind(prefix_of(label, rank, hosts[rank])),
                together,
            )
            for rank in chosen
        ]
        if not sources:
            return
        with self._lock:
            self._sources += sources
        self._background.begin()

    def finish(self, endpoints: Sequence[Endpoint] | None = None) -> None:
        """Show all that these ranks (default: all) have printed, and let them go."""
        files = None if endpoints is None else {endpoint.facts.files for endpoint in endpoints}
        with self._lock:
            ended = [one for one in self._sources if files is None or one.files in files]
            self._sources = [one for one in self._sources if one not in ended]
        for source in ended:
            source.finish()
        for together in _together(ended):
            together.flush(everything=True)

    def _turn(self) -> float | None:
        begun = time.monotonic()
        with self._lock:
            sources = list(self._sources)
        gone = [source for source in sources if not source.look()]
        with self._lock:
            self._sources = [source for source in self._sources if source not in gone]
            left = list(self._sources)
        there = _together(left)
        for together in _together(sources):
            together.flush(everything=together not in there)
        if not left:
            return None
        return max(LOOK_EVERY_S, _SHARE * (time.monotonic() - begun))


def _together(sources: Iterable[RankOutput]) -> set[Together]:
    """Return the groups of these ranks whose equal lines are shown as a single line."""
    return {source.together for source in sources if source.together is not None}
