"""``px.trace``: the record of every call that this process makes on groups, with the events of each rank."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

from phalanx.calls.call_state import SILENT, CallInfo, CallListener, listening
from phalanx.config import settings
from phalanx.errors import DeclarationError
from phalanx.group.group import Group
from phalanx.session.background import Background
from phalanx.session.session import session
from phalanx.tracing.events import STARTING, RankSpan, Trace, TracedCall, Track, TrackKey
from phalanx.tracing.files import check_path, check_writable, write
from phalanx.tracing.merging import TracedEpoch, merge
from phalanx.tracing.otel import export
from phalanx.tracing.spans import SpanWriter, describe, path_of, process, read_log
from phalanx.tracing.summary import Summary, summarize
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.messages import RUN
from phalanx.wire.value import Value
from phalanx.worker.control import MARK_VARIABLE

#: Maximum number of parts of calls, on a rank each, that a trace keeps; the oldest calls are dropped. A part takes a
#: few hundred bytes.
LIMIT = 2_000_000
_CHUNK = 8 << 20
_SAVE_EVERY_S = 5.0
_log = logging.getLogger("phalanx")


class Tracer:
    """A trace that is on between ``start()`` and ``stop()``, or during a ``with`` block; see :func:`trace`."""

    def __init__(self, path: str | os.PathLike[str] | None = None, *, title: str = "") -> None:
        self._path = None if path is None else Path(os.path.abspath(path))
        self._title = title
        self._pid = os.getpid()
        self._calls: CallTracer | None = None
        self._began = self._before = 0
        self._is_over = False
        self._trace: Trace | None = None
        if self._path is not None:
            check_path(self._path)

    def start(self) -> Tracer:
        """Start recording.

        Raises:
            DeclarationError: if the trace was started before, or its file could not be written.
        """
        if self._calls is not None:
            raise DeclarationError("this trace was already started; create another with px.trace(...)")
        if self._path is not None:
            check_writable(self._path)
        self._calls, self._began = _traces.begin(), time.time_ns()
        self._before = self._calls.made
        return self

    def stop(self) -> None:
        """Stop recording, and write the file if a path was given. Idempotent. Unfinished calls are kept unfinished."""
        if self._calls is None or self._is_over:
            return
        self._is_over = True
        try:
            self._trace = self.events
        finally:
            _traces.end(self._calls)
        if self._path is not None:
            self.save(self._path)

    @property
    def events(self) -> Trace:
        """The recorded events, so far or between start and stop.

        Raises:
            DeclarationError: if the trace was not started.
        """
        if self._trace is not None:
            return self._trace
        if self._calls is None:
            raise DeclarationError(
                "this trace was not started: use `with px.trace(...):`, or call start() first"
            )
        return self._calls.trace(self._began, self._before, self._title)

    def summary(self) -> Summary:
        """Return a summary of the recorded calls, a row per method: percentiles of times, bytes, and idle ranks."""
        return summarize(self.events)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        title: str | None = None,
        charts: Mapping[str, Sequence[float]] | None = None,
    ) -> Path:
        """Write the recorded events, in the format that the suffix of ``path`` names.

        Args:
            path: ``.json`` (Chrome's and Perfetto's) or ``.html`` (a report that needs nothing else).
            title: title of the report; by default the trace's title.
            charts: curves to show above the timeline of a report, by name.

        Raises:
            DeclarationError: if the suffix is unknown.
            OSError: if the file cannot be written.
        """
        made = self.events
        return write(made if title is None else replace(made, title=title), Path(path), charts or {})

    def to_opentelemetry(self, provider: Value = None) -> int:
        """Send the recorded events to OpenTelemetry as spans; return their number. Needs the extra ``phalanx[otel]``.

        Args:
            provider: a tracer provider of its SDK; by default the global provider.

        Raises:
            DeclarationError: if the package ``opentelemetry`` is not installed.
        """
        return export(self.events, provider)

    def __enter__(self) -> Tracer:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            self.stop()
        except Exception as failure:
            if error is None:
                raise
            # the error of the block matters more
            _log.warning("the trace was not written: %s", failure)


def trace(path: str | os.PathLike[str] | None = None, *, title: str = "") -> Tracer:
    """Record every call that this process makes on any group: ``with px.trace("run.json"): ...``.

    Of each call, the times are recorded at which it was planned, sent and ended; of each rank, the times at which it
    received, started, finished and returned the call, and at which its output was fetched; and bytes in each direction
    and errors. Spans of :class:`span` are recorded, too. ``start()`` and ``stop()`` do the same without a block.
    Several traces may be on at once. The variable ``PHALANX_TRACE=run.json`` traces a complete run.

    Args:
        path: file to write when the trace ends; the suffix names the format, see :meth:`Tracer.save`.
        title: title of the report.

    Raises:
        DeclarationError: if the suffix is unknown; on entry: if the file cannot be written.
    """
    return Tracer(path, title=title)


class CallTracer(CallListener):
    """Listener that records the steps of calls of all groups, while a trace is on. ``id`` names the ranks' files."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(4)
        self.spans = SpanWriter()
        self.made = self._kept_parts = 0
        self._lock = threading.Lock()
        self._calls: deque[TracedCall] = deque()
        self._epochs: list[TracedEpoch] = []
        self._open: WeakKeyDictionary[CallInfo, TracedCall] = WeakKeyDictionary()
        self._current: WeakKeyDictionary[Group, TracedEpoch] = WeakKeyDictionary()

    def planned(self, call: CallInfo) -> None:
        now, method = time.time_ns(), call.method
        if method == RUN:
            function = getattr(call.plan.args[0], "value", None)
            method = f"run {getattr(function, '__name__', type(function).__name__)}"
        elif method.startswith("__phalanx_"):
            return  # internal
        epoch, parts = self._epoch(call), [RankSpan(rank) for rank in call.plan.ranks]
        traced = TracedCall(0, epoch.group, epoch.epoch, call.role, method, call.began or now)
        traced.number, traced.parts = call.number, parts
        if call.number == SETUP_CALL:
            traced.method = STARTING
        else:
            traced.planned = now
            self._know_ranks(epoch, call)
        self._open[call] = traced
        with self._lock:
            self.made = traced.id = self.made + 1
            self._calls.append(traced)
            self._kept_parts += len(parts)
            while self._kept_parts > LIMIT and len(self._calls) > 1:
                self._kept_parts -= len(self._calls.popleft().parts)
        call.trace = self.id

    def passed(self, call: CallInfo, source: CallInfo) -> None:
        traced, other = self._open.get(call), self._open.get(source)
        if traced is not None and other is not None:
            traced.sources = (*traced.sources, other.id)

    def stored(self, call: CallInfo, nbytes: int) -> None:
        if traced := self._open.get(call):
            traced.stored_bytes += nbytes

    def sent(self, call: CallInfo, nbytes: int) -> None:
        if call.number == SETUP_CALL:
            self._know_ranks(self._epoch(call), call)
        if traced := self._open.get(call):
            traced.message_bytes = nbytes
            # inline, sending a call runs it at once; only a start has no time of a plan
            planned = traced.planned if call.core.backend.immediate else None
            traced.sent = planned or time.time_ns()

    def asked(self, call: CallInfo) -> None:
        if traced := self._open.get(call):
            traced.asked = traced.asked or time.time_ns()

    def arrived(self, call: CallInfo, rank: int | None) -> None:
        now, traced = time.time_ns(), self._open.get(call)
        for part in traced.parts if traced else ():
            if part.fetched is None and rank in (None, part.rank):
                part.fetched = now

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        if traced := self._open.get(call):
            traced.ended = time.time_ns()
            traced.error = None if error is None else describe(error)

    def trace(self, began: int, before: int, title: str) -> Trace:
        """Return the calls and spans that began since ``began``, and the counters.

        ``before`` is the number of calls made before ``began``.
        """
        with self._lock:
            epochs, calls = list(self._epochs), list(self._calls)
            kept, dropped = len(calls), self.made - len(calls) - before
        for epoch in epochs:
            epoch.collect()
        ended = time.time_ns()
        calls = [call for call in calls if began <= call.began <= ended]
        own = read_log(self.spans.read().splitlines())
        trace = merge(epochs, calls, own, Trace(began, ended, title=title))
        note = f"The first {dropped:,} calls are left out: a trace keeps the last {kept:,} calls."
        return replace(trace, notes=(*trace.notes, note)) if dropped > 0 else trace

    def end(self) -> None:
        """Detach from the groups: no trace needs their files any more."""
        with self._lock:
            for core in list(self._current):
                for epoch in self._epochs:
                    with suppress(ValueError):  # the epoch had ended
                        core.before_end.remove(epoch.collect_last)

    def _epoch(self, call: CallInfo) -> TracedEpoch:
        """Return the epoch of a call's group; its files are read for the last time before its processes end."""
        core, number = call.core, call.epoch.number
        with self._lock:
            epoch = self._current.get(core)
            if epoch is None or epoch.epoch != number:
                if epoch is not None:
                    epoch.end()
                epoch = TracedEpoch(epoch.group if epoch is not None else self._unused(core.name), number)
                self._current[core] = epoch
                self._epochs.append(epoch)
                core.before_end.append(epoch.collect_last)
            return epoch

    def _know_ranks(self, epoch: TracedEpoch, call: CallInfo) -> None:
        """Add the tracks of the ranks, once their processes are known."""
        if epoch.tracks or not call.epoch.endpoints:
            return
        # Without handles, which would keep alive the actors of a group that the driver has dropped.
        endpoints = [replace(one, handle=None) for one in call.epoch.endpoints]
        backend, trace = call.core.backend, self.id

        def read(rank: int, offset: int) -> bytes:
            return backend.read(endpoints[rank], path_of(endpoints[rank].facts.files, trace), offset, _CHUNK)

        epoch.read, now = read, time.time_ns()
        for rank, endpoint in enumerate(endpoints):
            key, slot = TrackKey(epoch.group, epoch.epoch, rank), endpoint.facts.slot
            track = Track(key, slot.host, slot.node_id, endpoint.facts.pid, slot.accelerator_ids, opened=now)
            epoch.tracks.append(track)

    def _unused(self, name: str) -> str:
        """Return ``name``; with a number if another group of that name is in the trace."""
        taken = {epoch.group for epoch in self._epochs}
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        return next(one for one in itertools.chain([name], numbered) if one not in taken)


class _Traces:
    """The traces of this process that are on, whose common tracer listens to calls, and that of ``PHALANX_TRACE``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.whole_run: Tracer | None = None
        self._count = 0

    def begin(self) -> CallTracer:
        """Begin a trace, and return the common tracer."""
        with self.lock:
            tracer = listening.current
            if not isinstance(tracer, CallTracer):
                tracer = CallTracer()
                process.sink = tracer.spans
                listening.current = tracer
            self._count += 1
            return tracer

    def end(self, tracer: CallTracer) -> None:
        """End a trace."""
        with self.lock:
            self._count -= 1
            if self._count == 0:
                listening.current = SILENT
                process.sink = None
                tracer.end()


_traces = _Traces()


def from_environment() -> None:
    """Start the trace that ``PHALANX_TRACE`` requests, unless it is on; never in a process of a group."""
    path = settings().trace
    if path is None or MARK_VARIABLE in os.environ:
        return
    with _traces.lock:
        if _traces.whole_run is None:
            _traces.whole_run = Tracer(path).start()
            atexit.register(save_environment_trace)


def save_environment_trace() -> None:
    """Write the current trace of ``PHALANX_TRACE``, which stays on; not in a forked process."""
    tracer = _traces.whole_run
    if tracer is None or tracer._path is None or tracer._pid != os.getpid():
        return
    try:
        tracer.save(tracer._path)
    except Exception as error:
        _log.warning("the trace was not written to %s: %s", tracer._path, error)


def _save_again() -> float:
    """Write the trace of ``PHALANX_TRACE``; return the seconds until the next write, 20 times this duration or more."""
    began = time.monotonic()
    save_environment_trace()
    return max(_SAVE_EVERY_S, 20 * (time.monotonic() - began))


_saver = Background(_save_again, first_after=_SAVE_EVERY_S)


def keep_saved() -> None:
    """Write the trace of ``PHALANX_TRACE`` periodically, for a process that will be killed, as an actor. Idempotent."""
    if _traces.whole_run is not None:
        _saver.begin()


session.at_shutdown.append(save_environment_trace)
