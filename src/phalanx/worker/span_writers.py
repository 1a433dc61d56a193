"""The trace files of a worker process, by trace in which it runs calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from phalanx.tracing.spans import Noted, SpanWriter, path_of, process

_KEPT = 8
_NOT_TRACED: AbstractContextManager[None] = nullcontext()


class Journals:
    """Span writers by trace, opened at its first call. ``own_process``: the process has no driver or other rank."""

    def __init__(self, own_process: bool) -> None:
        #: Beginning of the paths of the rank's files.
        self.files = ""
        self.on = False
        self._own_process = own_process
        self._open: dict[str, SpanWriter] = {}

    def of(self, trace: str, number: int, *, waits: bool = True) -> AbstractContextManager[Noted | None]:
        """Return a context around a call; its value is None if the call is not traced.

        ``waits``: the call may have to wait for arguments.
        """
        if not trace:
            if self.on:
                self.off()
            return _NOT_TRACED
        journal = self._open.get(trace)
        if journal is None:
            if len(self._open) >= _KEPT:
                self._open.pop(next(iter(self._open))).close()
            journal = self._open[trace] = SpanWriter(path_of(self.files, trace))
        if self._own_process:
            process.sink = journal
            self.on = True
        return Noted(journal, number, waits=waits)

    def off(self) -> None:
        """Drop spans outside of calls: the driver has ended its trace."""
        process.sink = None
        self.on = False
