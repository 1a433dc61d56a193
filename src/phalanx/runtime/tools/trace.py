"""``px.trace``: record every call of this process's groups, with what each rank did in it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from phalanx.config import settings
from phalanx.dispatch.plan import CallPlan
from phalanx.errors import DeclarationError
from phalanx.execution.control import MARK_VARIABLE
from phalanx.tracing.events import STARTING, Trace, Track, TrackKey
from phalanx.tracing.files import check_path, check_writable, write
from phalanx.tracing.journal import path_of, read
from phalanx.tracing.otel import export
from phalanx.tracing.recorder import Draft, Place, TraceRecorder, tracing
from phalanx.tracing.report import Report, report
from phalanx.tracing.spans import process
from phalanx.transport.base import Endpoint, Transport
from phalanx.wire.board import SETUP_CALL
from phalanx.wire.messages import RUN, RankSetup

if TYPE_CHECKING:
    from phalanx.runtime.groups.core import GroupCore

_CHUNK = 8 << 20
_log = logging.getLogger("phalanx")


@dataclass
class Traced:
    """One epoch of a group: what is recorded of it, and how its ranks' journals are reached."""

    recorder: TraceRecorder
    place: Place
    transport: Transport
    endpoints: list[Endpoint]
    _raw: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
                self.endpoints = []
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


class _Session:
    """What is common to all traces of this process that are on at the same time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.tracers: list[Tracer] = []
        self.traced: list[Traced] = []
        self.from_environment: Tracer | None = None
        self._names: dict[str, weakref.ref[GroupCore]] = {}

    def begin(self, tracer: Tracer) -> None:
        with self.lock:
            if not self.tracers:
                self.traced.clear()
                self._names.clear()
                process.sink = tracing.recorder = TraceRecorder()
            self.tracers.append(tracer)

    def end(self, tracer: Tracer) -> None:
        with self.lock:
            self.tracers.remove(tracer)
            if not self.tracers:
                process.sink = tracing.recorder = None
                self.traced.clear()

    def of(self, core: GroupCore, recorder: TraceRecorder) -> Traced:
        """The record of a group's present epoch."""
        with self.lock:
            found = core.traced
            if found is None or found.recorder is not recorder or found.place.epoch != core.epoch:
                found = core.traced = self._new(core, recorder)
                self.traced.append(found)
            return found

    def _new(self, core: GroupCore, recorder: TraceRecorder) -> Traced:
        place = Place(self._name(core), core.epoch)
        return Traced(recorder, place, core.transport, [])

    def _name(self, core: GroupCore) -> str:
        """The group's name; with a number behind it where another group of that name is in the trace."""
        number = 1
        while True:
            name = core.name if number == 1 else f"{core.name} ({number})"
            owner = self._names.setdefault(name, weakref.ref(core))
            if owner() is core:
                return name
            number += 1


_session = _Session()


def _know_ranks(traced: Traced, core: GroupCore) -> None:
    """Note where the ranks are, once their processes are there."""
    if traced.endpoints or traced.place.tracks or not core.endpoints:
        return
    traced.endpoints = list(core.endpoints)
    now = time.time_ns()
    for rank, endpoint in enumerate(traced.endpoints):
        slot = endpoint.facts.slot
        key = TrackKey(traced.place.group, traced.place.epoch, rank)
        track = Track(key, slot.host, slot.node_id, endpoint.facts.pid, slot.accelerator_ids, opened=now)
        traced.place.tracks.append(track)


def draft_of(core: GroupCore, role: str, method: str, plan: CallPlan, began: int) -> Draft | None:
    """The record of a call that is about to be made; None for the library's own calls, and while no trace is on."""
    recorder = tracing.recorder
    if recorder is None or (method.startswith("__phalanx_") and method != RUN):
        return None
    now = time.time_ns()
    traced = _session.of(core, recorder)
    _know_ranks(traced, core)
    draft = recorder.call(traced.place, role, _shown(method, plan), began or now)
    draft.planned = now
    draft.ranks = tuple(plan.ranks)
    return draft


def _shown(method: str, plan: CallPlan) -> str:
    if method != RUN:
        return method
    function = getattr(plan.args[0], "value", None)
    return f"run {getattr(function, '__name__', type(function).__name__)}"


class TracedStart:
    """The record of the start of an epoch, as a context around it: processes, then constructors. Off: does nothing."""

    def __init__(self, core: GroupCore) -> None:
        from_environment()
        self._core = core
        self._draft: Draft | None = None
        recorder = tracing.recorder
        if recorder is not None:
            place = _session.of(core, recorder).place
            self._draft = recorder.call(place, "", STARTING, time.time_ns())
            self._draft.number = SETUP_CALL

    @property
    def on(self) -> bool:
        """Whether a trace is on."""
        return self._draft is not None

    def amend(self, setup: RankSetup) -> RankSetup:
        """What a rank is told, with the trace for which it notes what it does."""
        recorder = tracing.recorder
        if self._draft is None or recorder is None:
            return setup
        now = time.time_ns()
        self._draft.encoded.append(now)
        self._draft.sent.append(now)
        return replace(setup, trace=recorder.id)

    def launched(self) -> None:
        """The processes are there, and have been told who they are."""
        recorder, traced = tracing.recorder, self._core.traced
        if self._draft is not None and recorder is not None and traced is not None:
            _know_ranks(traced, self._core)
            self._draft.ranks = tuple(range(self._core.world_size))
            self._draft.asked = time.time_ns()
            recorder.keep(self._draft)

    def constructed(self) -> None:
        """All constructors have returned."""
        if self._draft is not None:
            self._draft.arrived()
            self._draft.end(None)

    def __enter__(self) -> TracedStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._draft is not None and error is not None and self._draft.ended is None:
            self._draft.end(error)


def composing(draft: Draft | None) -> AbstractContextManager[None]:
    """A context in which a call's messages are made and sent."""
    return _NOT_TRACED if draft is None else draft.composing()


_NOT_TRACED: AbstractContextManager[None] = nullcontext()


def keep(draft: Draft, number: int) -> str:
    """Keep the record of a call of that number; the id of the trace, for its messages."""
    recorder = tracing.recorder
    if recorder is None:
        return ""
    draft.number = number
    recorder.keep(draft)
    return recorder.id


def collect(core: GroupCore) -> None:
    """Read a group's journals before its processes end."""
    traced, core.traced = core.traced, None
    if traced is not None and tracing.recorder is traced.recorder:
        traced.collect(last=True)


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


__all__ = ["Tracer", "trace"]
