"""What ``px.trace`` hears of calls, and how it reaches what their ranks wrote."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary, WeakValueDictionary

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Endpoint
from phalanx.calls.listeners import CallInfo, CallListener, everywhere
from phalanx.dispatch.plan import CallPlan
from phalanx.group.group import Group
from phalanx.tracing.events import STARTING, Trace, Track, TrackKey
from phalanx.tracing.recorder import Draft, Place, TraceRecorder
from phalanx.tracing.span_writer import path_of, read
from phalanx.tracing.spans import process
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.messages import RUN, Message

_CHUNK = 8 << 20


@dataclass
class TracedEpoch:
    """One epoch of a group: what is recorded of it, and how its ranks' journals are reached."""

    recorder: TraceRecorder
    place: Place
    transport: Backend
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

    def __init__(self, session: TraceSession, recorder: TraceRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self._drafts: WeakValueDictionary[int, Draft] = WeakValueDictionary()  # the recorder keeps them

    def planned(self, call: CallInfo) -> None:
        starts = call.number == SETUP_CALL
        if call.method.startswith("__phalanx_") and call.method != RUN:
            return  # the library's own
        now = time.time_ns()
        traced = self._session.of(call.core, call.epoch.number, self._recorder)
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

    def _of(self, call: CallInfo) -> Draft | None:
        return self._drafts.get(_key(call))

    def passed(self, call: CallInfo, source: CallInfo) -> None:
        draft, other = self._of(call), self._of(source)
        if draft is not None and other is not None:
            draft.sources.append(other.id)

    def stored(self, call: CallInfo, nbytes: int) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.stored_bytes += nbytes

    def composed(self, call: CallInfo, message: Message) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.composed(len(message.data))
            if call.core.transport.immediate:  # what is sent is run at once, so it counts as sent before
                draft.posted()

    def posted(self, call: CallInfo) -> None:
        draft = self._of(call)
        if draft is not None and not call.core.transport.immediate:
            draft.posted()

    def sent(self, call: CallInfo, nbytes: int) -> None:
        if call.number == SETUP_CALL:
            traced = self._session.of(call.core, call.epoch.number, self._recorder)
            traced.know_ranks(call.epoch.endpoints)

    def asked(self, call: CallInfo) -> None:
        draft = self._of(call)
        if draft is not None and draft.asked is None:
            draft.asked = time.time_ns()

    def arrived(self, call: CallInfo, rank: int | None) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.arrived(rank)

    def joined(self, call: CallInfo) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.joined = time.time_ns()

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        draft = self._of(call)
        if draft is not None:
            draft.end(error)


def _key(call: CallInfo) -> int:
    """What tells a call from all others: constructors of all groups bear one number."""
    return id(call) if call.number == SETUP_CALL else call.number


class TraceSession:
    """What is common to all traces of this process that are on at the same time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._on = 0  # traces
        self._recorder: TraceRecorder | None = None
        self._notes: CallNotes | None = None
        self._epochs: list[TracedEpoch] = []
        self._now: WeakKeyDictionary[Group, TracedEpoch] = WeakKeyDictionary()
        self._names: dict[str, weakref.ref[Group]] = {}

    def begin(self) -> None:
        """One trace more is on."""
        with self.lock:
            if not self._on:
                self._forget()
                recorder = process.sink = self._recorder = TraceRecorder()
                process.count = recorder.count
                self._notes = CallNotes(self, recorder)
                everywhere.add(self._notes)
            self._on += 1

    def end(self) -> None:
        """One trace less is on."""
        with self.lock:
            self._on -= 1
            if not self._on:
                process.sink = process.count = self._recorder = None
                if self._notes is not None:
                    everywhere.remove(self._notes)
                self._forget()

    def trace(self, began: int, title: str) -> Trace:
        """What was recorded since then."""
        with self.lock:
            recorder, epochs = self._recorder, list(self._epochs)
        if recorder is None:
            return Trace(began, time.time_ns())
        for epoch in epochs:
            epoch.collect()
        return recorder.trace([epoch.place for epoch in epochs], began, time.time_ns(), title)

    def _forget(self) -> None:
        self._epochs.clear()
        self._now.clear()
        self._names.clear()

    def of(self, core: Group, epoch: int, recorder: TraceRecorder) -> TracedEpoch:
        """The record of an epoch of a group."""
        with self.lock:
            found = self._now.get(core)
            if found is None or found.recorder is not recorder or found.place.epoch != epoch:
                found = self._now[core] = TracedEpoch(
                    recorder, Place(self._name(core), epoch, core.transport.immediate), core.transport
                )
                self._epochs.append(found)
                core.before_end.append(partial(self._collect_last, found))
            return found

    def _collect_last(self, traced: TracedEpoch, seconds: float) -> None:
        """Read a group's journals before its processes end."""
        if self._recorder is traced.recorder:
            traced.collect(last=True)

    def _name(self, core: Group) -> str:
        """The group's name; with a number behind it where another group of that name is in the trace."""
        number = 1
        while True:
            name = core.name if number == 1 else f"{core.name} ({number})"
            owner = self._names.setdefault(name, weakref.ref(core))
            if owner() is core:
                return name
            number += 1


session = TraceSession()


def _shown(method: str, plan: CallPlan) -> str:
    if method != RUN:
        return method
    function = getattr(plan.args[0], "value", None)
    return f"run {getattr(function, '__name__', type(function).__name__)}"
