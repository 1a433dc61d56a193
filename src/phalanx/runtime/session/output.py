"""The driver shows what chosen ranks print: one thread follows their files, and writes whole lines with a prefix."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.config import Shown
from phalanx.runtime.session.background import Background
from phalanx.show.logs import Lines, prefix_of
from phalanx.transport.base import Endpoint, Transport

LOOK_EVERY_S = 0.1
_CHUNK = 256 * 1024
_SHARE = 10  # a look may take a tenth of the time: files on other nodes are read less often


class Source:
    """The file of one rank, as far as it was shown.

    It does not hold the process's handle: a process whose last handle is dropped is to end.
    """

    def __init__(self, transport: Transport, endpoint: Endpoint, prefix: str) -> None:
        self.files = endpoint.facts.files
        self._place = replace(endpoint, handle=None)
        self._handle = weakref.ref(endpoint.handle)
        self._transport = transport
        self._prefix = prefix
        self._lines = Lines()
        self._offset = 0
        self._lock = threading.Lock()

    def look(self) -> bool:
        """Show what is new; False once the process is gone and all is shown."""
        with self._lock:
            alive = self._alive()  # asked first: what it wrote before it went is there now
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
            return handle is not None and self._transport.alive(replace(self._place, handle=handle))
        except Exception:  # the backend is shut down
            return False

    def _new(self) -> list[bytes]:
        """What was written since; at least one piece, perhaps an empty one."""
        path, found = self._place.facts.log, list[bytes]()
        while path:
            try:
                data = self._transport.read(self._place, path, self._offset, _CHUNK)
            except Exception:  # not there yet, or its node is gone: a look at logs harms nobody
                data = b""
            found.append(data)
            self._offset += len(data)
            if len(data) < _CHUNK:
                break
        return found or [b""]

    def _show(self, batches: Iterable[list[str]]) -> None:
        text = "".join(f"{self._prefix}{line}\n" for batch in batches for line in batch)
        if text:
            with contextlib.suppress(ValueError, OSError):  # the driver has closed its stdout
                sys.stdout.write(text)
                sys.stdout.flush()


class Display:
    """All ranks that this process shows. Its thread lives from the first one until the last one has ended."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._lock = threading.Lock()
        self._background = Background("phalanx-display", self._turn, finish=self.finish)

    def begin(self, transport: Transport, endpoints: Sequence[Endpoint], label: str, shown: Shown) -> None:
        """Show what these ranks print from now on, by rank those that were chosen."""
        if transport.immediate:
            return  # they print to this process's own terminal
        chosen = range(len(endpoints)) if shown == "all" else [r for r in shown if r < len(endpoints)]
        sources = [
            Source(transport, endpoints[rank], prefix_of(label, rank, endpoints[rank].facts.slot.host))
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

    def _turn(self) -> float | None:
        begun = time.monotonic()
        with self._lock:
            sources = list(self._sources)
        gone = [source for source in sources if not source.look()]
        with self._lock:
            self._sources = [source for source in self._sources if source not in gone]
            if not self._sources:
                return None
        return max(LOOK_EVERY_S, _SHARE * (time.monotonic() - begun))


display = Display()
