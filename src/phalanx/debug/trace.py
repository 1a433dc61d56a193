"""``px.trace``: records every call of this process's groups, with the events of each rank in it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from weakref import WeakKeyDictionary, WeakValueDictionary

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.calls.listeners import CallInfo, CallListener, everywhere
from phalanx.config import settings
from phalanx.errors import DeclarationError
from phalanx.group.group import Group
from phalanx.session.session import at_shutdown
from phalanx.tracing.events import STARTING, Call, Part, Trace, Track, TrackKey
from phalanx.tracing.files import check_path, check_writable, write
from phalanx.tracing.otel import export
from phalanx.tracing.recorder import OpenCall, TracedEpoch, TraceRecorder
from phalanx.tracing.span_writer import path_of, read
from phalanx.tracing.spans import process
from phalanx.tracing.summary import Summary, summarize
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.messages import RUN, Message
from phalanx.wire.value import Value
from phalanx.worker.control import MARK_VARIABLE

_CHUNK = 8 << 20
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
            DeclarationError: if it was started before, or its file could not be written.
        """
        if self._began is not None:
            raise DeclarationError(
                "this trace was started before; make another with px.trace(...) for another stretch of time"
            )
        if self._path is not None:
            check_writable(self._path)
        _session.begin()
        self._began = time.time_ns()
        return self

    def stop(self) -> None:
        """Record no more, and write the file that was named. Idempotent. Unfinished calls stay as far as they were."""
        if self._began is None or self._trace is not None:
            return
        try:
            self._trace = self.events
        finally:
            _session.end()
        if self._path is not None:
            self.save(self._path)

    @property
    def events(self) -> Trace:
        """The recorded events, so far or between start and stop.

        Raises:
            DeclarationError: if it was not started.
        """
        if self._trace is not None:
            return self._trace
        if self._began is None:
            raise DeclarationError(
                "this trace was not started: use `with px.trace(...):`, or call start() first"
            )
        return _session.trace(self._began, self._title)

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
        """Write the recorded events, in the format that the suffix of ``path`` names.

        Args:
            path: ``.json`` (Chrome's and Perfetto's), ``.jsonl``, or ``.html`` (a report that needs nothing else).
            title: of the report; default the trace's own.
            charts: curves to show above the timeline of a report, by name.

        Raises:
            DeclarationError: if the suffix is another.
            OSError: if the file cannot be written.
        """
        made = self.events
        return write(made if title is None else replace(made, title=title), Path(path), charts or {})

    def to_opentelemetry(self, provider: Value = None) -> int:
        """Send the recorded events to OpenTelemetry as spans; return their number. Needs the extra ``phalanx[otel]``.

        Args:
            provider: a tracer provider of its SDK; default the global one.

        Raises:
            DeclarationError: if the package ``opentelemetry`` is not installed.
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
            # the error of the block matters more
            _log.warning("the trace was not written: %s", failure)


def trace(path: str | os.PathLike[str] | None = None, *, title: str = "") -> Tracer:
    """Record every call that this process makes on any group: ``with px.trace("run.json"): ...``.

    For each call and rank the times are recorded at which it was planned, encoded, sent, taken up, had its arguments,
    was finished, returned, fetched and joined; and bytes each way and errors. Spans of :class:`span` are recorded with
    them. ``start()`` and ``stop()`` do the same without a block. Several may be on at once. The variable
    ``PHALANX_TRACE=run.json`` traces a whole run.

    Args:
        path: where to write it when it ends; the suffix names the format, see :meth:`Tracer.save`.
        title: of the report.

    Raises:
        DeclarationError: if the suffix names no format; on entry: if nothing can be written there.
    """
    return Tracer(path, title=title)


@dataclass(eq=False, kw_only=True)
class ObservedEpoch(TracedEpoch):
    """An epoch of a group while it is traced: how the files of its ranks are read."""

    trace: str
    backend: Backend
    endpoints: tuple[Endpoint, ...] = ()
    _raw: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def know_ranks(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Record where the ranks are, once their processes are there."""
        if self.endpoints or self.tracks:
            return
        self.endpoints, now = endpoints, time.time_ns()
        for rank, endpoint in enumerate(endpoints):
            key, slot = TrackKey(self.group, self.epoch, rank), endpoint.facts.slot
            track = Track(key, slot.host, slot.node_id, endpoint.facts.pid, slot.accelerator_ids, opened=now)
            self.tracks.append(track)

    def collect(self, seconds: float | None = None, *, last: bool = False) -> None:
        """Read what the ranks have written since the last time; ``last``: their processes end now.

        A file that cannot be read is noted in the trace: no work of the user fails for it.
        """
        with self._lock:
            for rank, endpoint in enumerate(self.endpoints):
                try:
                    self._read(rank, endpoint)
                except FileNotFoundError:
                    pass  # no traced call has reached it
                except Exception as error:
                    note = f"What rank {rank} of {self.group} wrote cannot be read: {error}"
                    self.notes += [note] if note not in self.notes else []
            if last:
                self.endpoints, now = (), time.time_ns()
                self.tracks = [replace(track, closed=now) for track in self.tracks]

    def _read(self, rank: int, endpoint: Endpoint) -> None:
        path = path_of(endpoint.facts.files, self.trace)
        raw = self._raw.setdefault(rank, bytearray())
        before = len(raw)
        while chunk := self.backend.read(endpoint, path, len(raw), _CHUNK):
            raw += chunk
        if len(raw) > before:
            key = TrackKey(self.group, self.epoch, rank)
            self.readings[key] = read(bytes(raw).splitlines(), key)


class CallTracer(CallListener):
    """Records the steps of calls."""

    def __init__(self, session: TraceSession, recorder: TraceRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self._calls: WeakValueDictionary[int, OpenCall] = WeakValueDictionary()  # the recorder keeps them

    def planned(self, call: CallInfo) -> None:
        starts = call.number == SETUP_CALL
        if call.method.startswith("__phalanx_") and call.method != RUN:
            return  # the library's own
        now = time.time_ns()
        of = self._session.epoch_of(call.core, call.epoch.number, self._recorder)
        method = STARTING if starts else call.method
        if method == RUN:
            function = getattr(call.plan.args[0], "value", None)
            method = f"run {getattr(function, '__name__', type(function).__name__)}"
        parts = [Part(rank) for rank in call.plan.ranks]
        made = Call(
            next(self._recorder.ids), of.group, of.epoch, call.role, method, call.began or now, parts=parts
        )
        if not starts:
            made.planned = now
            of.know_ranks(call.epoch.endpoints)
        self._calls[_key(call)] = traced = OpenCall(made, call.number, of)
        self._recorder.keep(traced)
        call.trace = self._recorder.id

    def passed(self, call: CallInfo, source: CallInfo) -> None:
        traced, other = self._calls.get(_key(call)), self._calls.get(_key(source))
        if traced is not None and other is not None:
            traced.call.sources = (*traced.call.sources, other.call.id)

    def stored(self, call: CallInfo, nbytes: int) -> None:
        if traced := self._calls.get(_key(call)):
            traced.call.stored_bytes += nbytes

    def composed(self, call: CallInfo, message: Message) -> None:
        if traced := self._calls.get(_key(call)):
            traced.composed(len(message.data))
            if call.core.backend.immediate:  # a message is run at once when it is sent
                traced.posted()

    def posted(self, call: CallInfo) -> None:
        traced = self._calls.get(_key(call))
        if traced is not None and not call.core.backend.immediate:
            traced.posted()

    def sent(self, call: CallInfo, nbytes: int) -> None:
        if call.number == SETUP_CALL:
            epoch = self._session.epoch_of(call.core, call.epoch.number, self._recorder)
            epoch.know_ranks(call.epoch.endpoints)

    def asked(self, call: CallInfo) -> None:
        traced = self._calls.get(_key(call))
        if traced is not None and traced.call.asked is None:
            traced.call.asked = time.time_ns()

    def arrived(self, call: CallInfo, rank: int | None) -> None:
        if traced := self._calls.get(_key(call)):
            traced.arrived(rank)

    def joined(self, call: CallInfo) -> None:
        if traced := self._calls.get(_key(call)):
            traced.call.joined = time.time_ns()

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        if traced := self._calls.get(_key(call)):
            traced.ended(error)


def _key(call: CallInfo) -> int:
    """Return a key that no other call has: constructors of all groups have one number."""
    return id(call) if call.number == SETUP_CALL else call.number


class TraceSession:
    """State of all traces of this process that are on at the same time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._on = 0  # number of traces
        self._recorder: TraceRecorder | None = None
        self._listener: CallListener | None = None
        self._epochs: list[ObservedEpoch] = []
        self._current: WeakKeyDictionary[Group, ObservedEpoch] = WeakKeyDictionary()
        self._names: dict[str, weakref.ref[Group]] = {}

    def begin(self) -> None:
        """Begin a trace."""
        with self.lock:
            if not self._on:
                recorder = process.sink = self._recorder = TraceRecorder()
                process.count = recorder.count
                self._listener = CallTracer(self, recorder)
                everywhere.add(self._listener)
            self._on += 1

    def end(self) -> None:
        """End a trace."""
        with self.lock:
            self._on -= 1
            if self._on:
                return
            process.sink = process.count = self._recorder = None
            if self._listener is not None:
                everywhere.remove(self._listener)
            self._epochs.clear()
            self._current.clear()
            self._names.clear()

    def trace(self, began: int, title: str) -> Trace:
        """Return the events since a time."""
        with self.lock:
            recorder, epochs = self._recorder, list(self._epochs)
        if recorder is None:
            return Trace(began, time.time_ns())
        for epoch in epochs:
            epoch.collect()
        return recorder.trace(epochs, began, time.time_ns(), title)

    def epoch_of(self, core: Group, number: int, recorder: TraceRecorder) -> ObservedEpoch:
        """Return the record of an epoch of a group; its files are read for the last time before its processes end."""
        with self.lock:
            epoch = self._current.get(core)
            if epoch is None or epoch.trace != recorder.id or epoch.epoch != number:
                backend, name = core.backend, self._name(core)
                epoch = ObservedEpoch(name, number, backend.immediate, trace=recorder.id, backend=backend)
                self._current[core] = epoch
                self._epochs.append(epoch)
                core.before_end.append(partial(self._collect_last, epoch))
            return epoch

    def _collect_last(self, epoch: ObservedEpoch, seconds: float) -> None:
        if self._recorder is not None and self._recorder.id == epoch.trace:
            epoch.collect(last=True)

    def _name(self, core: Group) -> str:
        """Return the group's name; with a number if another group of that name is in the trace."""
        number = 1
        while True:
            name = core.name if number == 1 else f"{core.name} ({number})"
            if self._names.setdefault(name, weakref.ref(core))() is core:
                return name
            number += 1


_session = TraceSession()


class _WholeRun:
    """The trace that ``PHALANX_TRACE`` asks for, once it is on."""

    tracer: Tracer | None = None
    saver: threading.Thread | None = None


def from_environment() -> None:
    """Start the trace that ``PHALANX_TRACE`` asks for, unless it is on; never in a process of a group."""
    path = settings().trace
    if path is None or MARK_VARIABLE in os.environ:
        return
    with _session.lock:
        if _WholeRun.tracer is None:
            _WholeRun.tracer = Tracer(path).start()
            atexit.register(save_environment_trace, os.getpid())


def save_environment_trace(pid: int | None = None) -> None:
    """Write the trace that ``PHALANX_TRACE`` asked for, as it is now; it stays on."""
    tracer = _WholeRun.tracer
    if tracer is None or tracer._path is None or (pid is not None and pid != os.getpid()):
        return
    try:
        tracer.save(tracer._path)
    except Exception as error:
        _log.warning("the trace was not written to %s: %s", tracer._path, error)


def keep_saved(every_s: float = 5.0) -> None:
    """Write that trace again and again, in a process that is killed at its end, as a Ray actor. Idempotent.

    Saving takes a twentieth of the time at most.
    """

    def save_forever() -> None:
        cost = 0.0
        while True:
            time.sleep(max(every_s, 20 * cost))
            began = time.monotonic()
            save_environment_trace()
            cost = time.monotonic() - began

    with _session.lock:
        if _WholeRun.tracer is not None and _WholeRun.saver is None:
            _WholeRun.saver = threading.Thread(target=save_forever, name="phalanx-trace", daemon=True)
            _WholeRun.saver.start()


at_shutdown(save_environment_trace)
