"""``px.trace``: record every call of this process's groups, with what each rank did in it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from phalanx.config import settings
from phalanx.debug.trace_session import session
from phalanx.errors import DeclarationError
from phalanx.session.session import at_shutdown
from phalanx.tracing.events import Trace
from phalanx.tracing.files import check_path, check_writable, write
from phalanx.tracing.otel import export
from phalanx.tracing.summary import Summary, summarize
from phalanx.wire.value import Value
from phalanx.worker.control import MARK_VARIABLE

_log = logging.getLogger("phalanx")


class Tracer:
    """A trace that is on between ``start()`` and ``stop()``, or for the time of a ``with`` block; see :func:`trace`."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> None:
        self._path = None if path is None else Path(os.path.abspath(path))
        self._title = title
        self._began: int | None = None
        self._trace: Trace | None = None
        if self._path is not None:
            check_path(self._path)

    def start(self) -> Tracer:
        """Record from now on.

        Raises:
            DeclarationError: it was started before, or its file could not be written.
        """
        if self._began is not None:
            raise DeclarationError(
                "this trace was started before; make another with px.trace(...) for another stretch of time"
            )
        if self._path is not None:
            check_writable(self._path)
        session.begin()
        self._began = time.time_ns()
        return self

    def stop(self) -> None:
        """Record no more; write the file that was named. Idempotent. Calls under way stay as far as they are seen."""
        if self._began is None or self._trace is not None:
            return
        try:
            self._trace = self._now()
        finally:
            session.end()
        if self._path is not None:
            self.save(self._path)

    @property
    def events(self) -> Trace:
        """What was recorded, so far or between start and stop.

        Raises:
            DeclarationError: it was not started.
        """
        return self._trace if self._trace is not None else self._now()

    def _now(self) -> Trace:
        if self._began is None:
            raise DeclarationError(
                "this trace was not started: use `with px.trace(...):`, or call start() first"
            )
        return session.trace(self._began, self._title)

    def summary(self) -> Summary:
        """Return one row per method, recorded so far: calls, percentiles of their times, bytes, and idle ranks."""
        return summarize(self.events)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        title: str | None = None,
        charts: Mapping[str, Sequence[float]] | None = None,
    ) -> Path:
        """Write what was recorded, in the format that the suffix of ``path`` names.

        Args:
            path: ``.json`` (Chrome's and Perfetto's), ``.jsonl``, or ``.html`` (a report that needs nothing else).
            title: of the report; default the trace's own.
            charts: curves to show above the timeline of a report, by name.

        Raises:
            DeclarationError: another suffix.
            OSError: the file cannot be written.
        """
        made = self.events
        if title is not None:
            made = replace(made, title=title)
        return write(made, Path(path), charts or {})

    def to_opentelemetry(self, provider: Value = None) -> int:
        """Give what was recorded to OpenTelemetry as spans; how many they were. Needs the extra ``phalanx[otel]``.

        Args:
            provider: a tracer provider of its SDK; default the global one.

        Raises:
            DeclarationError: the package ``opentelemetry`` is not installed.
        """
        return export(self.events, provider)

    def __enter__(self) -> Tracer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except Exception as failure:
            if error is None:
                raise
            # What went wrong in the block matters more.
            _log.warning("the trace was not written: %s", failure)


def trace(path: str | os.PathLike[str] | None = None, *, title: str = "") -> Tracer:
    """Record every call that this process makes on any group: ``with px.trace("run.json"): ...``.

    Of each call and rank are recorded: planned, encoded, sent, taken up, arguments there, finished, returned, fetched,
    joined; bytes each way; errors. Spans of :class:`span` are recorded with them. ``start()`` and ``stop()`` do the
    same without a block. Several may be on at once. The variable ``PHALANX_TRACE=run.json`` traces a whole run.

    Args:
        path: where to write it when it ends; the suffix names the format, see :meth:`Tracer.save`.
        title: what the report is headed with.

    Raises:
        DeclarationError: the suffix names no format; on entry: nothing can be written there.
    """
    return Tracer(path, title=title)


class _WholeRun:
    """The trace that ``PHALANX_TRACE`` asks for, once it is on."""

    tracer: Tracer | None = None
    saver: threading.Thread | None = None


_whole_run = _WholeRun()


def from_environment() -> None:
    """Start the trace that ``PHALANX_TRACE`` asks for, unless that was done; never in a process of a group."""
    path = settings().trace
    if path is None or MARK_VARIABLE in os.environ:
        return
    with session.lock:
        if _whole_run.tracer is None:
            _whole_run.tracer = Tracer(path).start()
            atexit.register(save_environment_trace, os.getpid())


def save_environment_trace(pid: int | None = None) -> None:
    """Write the trace that ``PHALANX_TRACE`` asked for, as it is now; it goes on."""
    tracer = _whole_run.tracer
    if tracer is None or tracer._path is None or (pid is not None and pid != os.getpid()):
        return
    path = Path(tracer._path)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        os.replace(tracer.save(unfinished), path)  # whole or not at all, however this process ends
    except Exception as error:
        _log.warning("the trace was not written to %s: %s", tracer._path, error)


def keep_saved(every_s: float = 5.0) -> None:
    """Write that trace again and again, where nothing can be done at the end: a Ray actor is killed. Idempotent.

    Saving takes a twentieth of the time at most.
    """
    with session.lock:
        if _whole_run.tracer is None or _whole_run.saver is not None:
            return
        _whole_run.saver = threading.Thread(
            target=_save_forever, args=(every_s,), name="phalanx-trace", daemon=True
        )
    _whole_run.saver.start()


def _save_forever(every_s: float) -> None:
    cost = 0.0
    while True:
        time.sleep(max(every_s, 20 * cost))
        began = time.monotonic()
        save_environment_trace()
        cost = time.monotonic() - began


at_shutdown(save_environment_trace)

__all__ = ["Tracer", "trace"]
