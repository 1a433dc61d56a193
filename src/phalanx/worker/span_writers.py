"""The journals of a worker process: one for each trace for which it is told to note what it does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from phalanx.tracing.span_writer import Noted, SpanWriter, path_of
from phalanx.tracing.spans import process

_KEPT = 8
_NOT_TRACED: AbstractContextManager[None] = nullcontext()


class Journals:
    """Opened when the first call of a trace arrives. ``own_process``: no driver and no other rank lives here."""

    def __init__(self, own_process: bool) -> None:
        self.files = ""
        self.on = False
        self._own_process = own_process
        self._open: dict[str, SpanWriter] = {}

    def of(self, trace: str, number: int, *, waits: bool = True) -> AbstractContextManager[Noted | None]:
        """A context around one call; it gives None where the call is not traced.

        ``waits``: its arguments may have to be waited for.
        """
        if not trace:
            if self.on:
                self.off()
            return _NOT_TRACED
        journal = self._open.get(trace)
        if journal is None:
            journal = self._make(trace)
        if self._own_process:
            process.sink, process.count = journal, journal.count
            self.on = True
        return Noted(journal, number, waits=waits)

    def off(self) -> None:
        """The driver has ended its trace: spans that lie in no call have nobody to hear of them."""
        process.sink = process.count = None
        self.on = False

    def _make(self, trace: str) -> SpanWriter:
        if len(self._open) >= _KEPT:
            self._open.pop(next(iter(self._open))).close()
        journal = self._open[trace] = SpanWriter(path_of(self.files, trace))
        return journal


def size_of(sent_back: Any) -> int:
    """Bytes of what a rank gives back for one call: an output, or what is known of it with its halves."""
    if isinstance(sent_back, tuple):
        return sent_back[0].nbytes
    if isinstance(sent_back, bytes | str):
        return len(sent_back)
    return getattr(sent_back, "nbytes", 0)
