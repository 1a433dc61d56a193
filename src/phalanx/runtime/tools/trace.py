"""``px.trace``: record every call of this process's groups, with what each rank did in it."""

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
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from phalanx.config import settings
from phalanx.dispatch.plan import CallPlan
from phalanx.errors import DeclarationError
from phalanx.execution.control import MARK_VARIABLE
from phalanx.runtime.calls.listeners import CallListener, HeardCall, everywhere
from phalanx.runtime.life.epoch import GroupLife
from phalanx.runtime.session.connection import at_shutdown
from phalanx.tracing.events import STARTING, Trace, Track, TrackKey
from phalanx.tracing.files import check_path, check_writable, write
from phalanx.tracing.journal import path_of, read
from phalanx.tracing.otel import export
from phalanx.tracing.recorder import Draft, Place, TraceRecorder, tracing
from phalanx.tracing.report import Report, report
from phalanx.tracing.spans import process
from phalanx.transport.base import Endpoint, Transport
from phalanx.wire.messages import RUN, Message
from phalanx.wire.side_channel import SETUP_CALL

_CHUNK = 8 << 20
_log = logging.getLogger("phalanx")


@dataclass
class Traced:
    """One epoch of a group: what is recorded of it, and how its ranks' journals are reached."""

    recorder: TraceRecorder
    place: Place
    transport: Transport
    endpoints: tuple[Endpoint, ...] = ()
    _raw: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def know_ranks(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Note where the ranks are, once their processes are there."""
        if self.endpoints or self.place.tracks:
            return
        self.endpoints = endpoints
        now = time.time_ns()
        for rank, endpoint in enumerate(endpoints):
            slot = endpoint.facts.slot
            key = TrackKey(self.place.group, self.place.epoch, rank)
            self.place.tracks.append(
                Track(key, slot.host, slot.node_id, endpoint.facts.pid, slot.accelerator_ids, opened=now)
            )

    def collect(self, *, last: bool = False) -> None:
        """Read what the ranks have written since the last time; ``last`` says that their processes end now.

        What cannot be read is noted in the trace: nobody's work fails for it.
        """
        with self._lock:
            for rank, endpoint in enumerate(self.endpoints):
                try:
                    self._collect(rank, endpoint)
                except FileNotFoundError:
                    pass  # no traced call has reached it
                except Exception as error:
                    note = f"What rank {rank} of {self.place.group} wrote cannot be read: {error}"
                    if note not in self.place.notes:
                        self.place.notes.append(note)
            if last:
                self.endpoints = ()
                now = time.time_ns()
                self.place.tracks = [replace(track, closed=now) for track in self.place.tracks]

    def _collect(self, rank: int, endpoint: Endpoint) -> None:
        path = path_of(endpoint.facts.files, self.recorder.id)
        raw = self._raw.setdefault(rank, bytearray())
        before = len(raw)
        while chunk := self.transport.read(endpoint, path, len(raw), _CHUNK):
            raw += chunk
        if len(raw) > before:
            key = TrackKey(self.place.group, self.place.epoch, rank)
            self.place.readings[key] = read(bytes(raw).splitlines(), key)


class CallNotes(CallListener):
    """Puts down what it hears of calls in the recorder that is on."""

    def __init__(self, session: _Session, recorder: TraceRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self._drafts: WeakValueDictionary[int, Draft] = WeakValueDictionary()  # the recorder keeps them

    def planned(self, call: HeardCall) -> None:
        starts = call.number == SETUP_CALL
        if call.method.startswith("__phalanx_") and call.method != RUN:
            return  # the library's own
        now = time.time_ns()
        traced = self._session.of(call.life, call.epoch.number, self._recorder)
        method = STARTING if starts else _shown(call.method, call.plan)
        draft = self._recorder.call(traced.place, call.role, method, call.began or now)
        draft.number = call.number
        draft.ranks = tuple(call.plan.ranks)
        if not starts:
            draft.planned = now
            traced.know_ranks(call.epoch.endpoints)
        self._recorder.keep(draft)
        self._drafts[_key(call)] = draft
        call.trace = self._recorder.id

    def _of(self, call: HeardCall) -> Draft | None:
        return self._drafts.get(_key(call))

    def passed(self, call: HeardCall, source: HeardCall) -> None:
        draft, other = self._of(call), self._of(source)
        if draft is not None and other is not None:
            draft.sources.append(other.id)

    def stored(self, call: HeardCall, nbytes: int) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.stored_bytes += nbytes

    def composed(self, call: HeardCall, message: Message) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.composed(len(message.data))
            if call.life.transport.immediate:  # what is sent is run at once, so it counts as sent before
                draft.posted()

    def posted(self, call: HeardCall) -> None:
        draft = self._of(call)
        if draft is not None and not call.life.transport.immediate:
            draft.posted()

    def sent(self, call: HeardCall, nbytes: int) -> None:
        if call.number == SETUP_CALL:
            traced = self._session.of(call.life, call.epoch.number, self._recorder)
            traced.know_ranks(call.epoch.endpoints)

    def asked(self, call: HeardCall) -> None:
        draft = self._of(call)
        if draft is not None and draft.asked is None:
            draft.asked = time.time_ns()

    def arrived(self, call: HeardCall, rank: int | None) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.arrived(rank)

    def joined(self, call: HeardCall) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.joined = time.time_ns()

    def ended(self, call: HeardCall, error: BaseException | None) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.end(error)


def _key(call: HeardCall) -> int:
    """What tells a call from all others: constructors of all groups bear one number."""
    return id(call) if call.number == SETUP_CALL else call.number


class _Session:
    """What is common to all traces of this process that are on at the same time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tracers: list[Tracer] = []
        self.traced: list[Traced] = []
        self.from_environment: Tracer | None = None
        self._now: WeakKeyDictionary[GroupLife, Traced] = WeakKeyDictionary()
        self._names: dict[str, weakref.ref[GroupLife]] = {}
        self._notes: CallNotes | None = None

    def begin(self, tracer: Tracer) -> None:
        with self.lock:
            if not self.tracers:
                self._forget()
                recorder = process.sink = tracing.recorder = TraceRecorder()
                self._notes = CallNotes(self, recorder)
                everywhere.add(self._notes)
            self.tracers.append(tracer)

    def end(self, tracer: Tracer) -> None:
        with self.lock:
            self.tracers.remove(tracer)
            if not self.tracers:
                process.sink = tracing.recorder = None
                if self._notes is not None:
                    everywhere.remove(self._notes)
                self._forget()

    def _forget(self) -> None:
        self.traced.clear()
        self._now.clear()
        self._names.clear()

    def of(self, life: GroupLife, epoch: int, recorder: TraceRecorder) -> Traced:
        """The record of an epoch of a group."""
        with self.lock:
            found = self._now.get(life)
            if found is None or found.recorder is not recorder or found.place.epoch != epoch:
                found = self._now[life] = Traced(recorder, Place(self._name(life), epoch), life.transport)
                self.traced.append(found)
                life.before_end.append(partial(self._collect_last, found))
            return found

    def _collect_last(self, traced: Traced, seconds: float) -> None:
        """Read a group's journals before its processes end."""
        if tracing.recorder is traced.recorder:
            traced.collect(last=True)

    def _name(self, life: GroupLife) -> str:
        """The group's name; with a number behind it where another group of that name is in the trace."""
        number = 1
        while True:
            name = life.name if number == 1 else f"{life.name} ({number})"
            owner = self._names.setdefault(name, weakref.ref(life))
            if owner() is life:
                return name
            number += 1


_session = _Session()


def _shown(method: str, plan: CallPlan) -> str:
    if method != RUN:
        return method
    function = getattr(plan.args[0], "value", None)
    return f"run {getattr(function, '__name__', type(function).__name__)}"


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
        _session.begin(self)
        self._began = time.time_ns()
        return self

    def stop(self) -> None:
        """Record no more; write the file that was named. Idempotent. Calls under way stay as far as they are seen."""
        if self._began is None or self._trace is not None:
            return
        try:
            self._trace = self._now()
        finally:
            _session.end(self)
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
        with _session.lock:
            recorder, traced = tracing.recorder, list(_session.traced)
        if recorder is None:
            return Trace(self._began, time.time_ns())
        for one in traced:
            one.collect()
        ended = time.time_ns()
        return recorder.trace([one.place for one in traced], self._began, ended, self._title)

    def report(self) -> Report:
        """Tables of what was recorded: time by method, skew, ranks, idle accelerators, bytes, failures."""
        return report(self.events)

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

    def to_opentelemetry(self, provider: Any = None) -> int:
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
            _log.warning(
                "the trace was not written: %s", failure
            )  # what went wrong in the block matters more


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


def from_environment() -> None:
    """Start the trace that ``PHALANX_TRACE`` asks for, unless that was done; never in a process of a group."""
    path = settings().trace
    if path is None or MARK_VARIABLE in os.environ:
        return
    with _session.lock:
        if _session.from_environment is None:
            _session.from_environment = Tracer(path).start()
            atexit.register(save_environment_trace, os.getpid())


def save_environment_trace(pid: int | None = None) -> None:
    """Write the trace that ``PHALANX_TRACE`` asked for, as it is now; it goes on."""
    tracer = _session.from_environment
    if tracer is None or tracer._path is None or (pid is not None and pid != os.getpid()):
        return
    try:
        tracer.save(tracer._path)
    except Exception as error:
        _log.warning("the trace was not written to %s: %s", tracer._path, error)


at_shutdown(save_environment_trace)

__all__ = ["Tracer", "trace"]
