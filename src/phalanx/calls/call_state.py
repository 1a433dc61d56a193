"""The state of a call, the listener of its steps, and its pending results."""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from phalanx.backends.backend_types import (
    Backend,
    FetchFailed,
    NotReady,
    RankOutcome,
    RankStream,
    Ref,
    ResultHandle,
    Waited,
)
from phalanx.dispatch.plan import CallPlan, Target
from phalanx.group.epoch import Epoch
from phalanx.wire.failure import RankFailure
from phalanx.wire.unpack import Meter
from phalanx.wire.value import Value, bounded


class CallListener:
    """Base class of listeners, such as a trace. Methods run on the thread of each step, and must be quick."""

    def planned(self, call: CallInfo) -> None:
        """Note that the call was planned; nothing is encoded yet."""

    def passed(self, call: CallInfo, source: CallInfo) -> None:
        """Note that the result of another call, ``source``, is an argument."""

    def stored(self, call: CallInfo, nbytes: int) -> None:
        """Note that a value of ``nbytes`` bytes was stored for the call."""

    def sent(self, call: CallInfo, nbytes: int) -> None:
        """Note that all messages were sent, ``nbytes`` bytes in total."""

    def asked(self, call: CallInfo) -> None:
        """Note that a caller waits for the call. May be called again."""

    def arrived(self, call: CallInfo, rank: int | None) -> None:
        """Note that the output of a rank has arrived; None: of all ranks."""

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        """Note that the call ended, successfully (None) or with ``error``. Called once."""


SILENT = CallListener()


class Listening:
    """Holder of the listener of calls that this process plans from now on: the trace that is on."""

    current = SILENT


listening = Listening()


@dataclass(eq=False, repr=False)  # its outputs can be large
class CallInfo:
    """A call as listeners and the diagnosis see it: its ranks, epoch, deadline and pending results.

    Attributes:
        number: identifies the call in traces and debug mode; grows with the calls of this process on the group.
        acts: False if the end of the call has no effect on the group, as for a start or a call of the library.
        limit: seconds from ``started`` (on the backend's clock) to the deadline; None: no deadline.
        stall_after: seconds until the state of the call is logged; None: never.
        collector: passed to a custom collect function as the group.
        began: start of its planning, in ns since 1970; 0: not recorded.
        arrivals: pending results; set when the call is sent.
        trace: id of its trace, sent with the messages; a listener may set it in ``planned``.
        verify: checks the outputs before they are joined, in debug mode.
        resend: sends the call again if its only rank refused it, and returns whether it did; None: it never does.
        over: True once the call has ended: ``value`` is the joined result, or ``error`` is set.
    """

    core: Any  # the Group, whose module imports this module
    epoch: Epoch
    plan: CallPlan
    role: str
    method: str
    number: int
    listener: CallListener = SILENT
    acts: bool = True
    limit: float | None = None
    stall_after: float | None = None
    collector: Target | None = None
    began: int = 0
    arrivals: Results = field(init=False)
    trace: str = ""
    verify: Callable[[Any, Sequence[Any]], None] | None = None
    resend: Callable[[CallInfo], bool] | None = None
    told: bool = False
    was_sent: bool = False
    over: bool = False
    value: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.started: float = self.core.backend.now()
        self.limit = None if self.limit is None else bounded(self.limit)
        self.deadline = None if self.limit is None else self.started + self.limit
        self.stall_after = None if self.stall_after is None else bounded(self.stall_after)
        self.stall_at = None if self.stall_after is None else self.started + self.stall_after
        #: Counter of the bytes that arrive; None if ``acts`` is False.
        self.meter: Meter | None = self.core.counts.arrived if self.acts else None
        #: True if outputs are decoded without a copy, since joining copies their rows.
        self.copies = self.plan.gather.collect == "join"
        self.cancels = threading.Lock()  # held by the thread that cancels the call
        self._lock = threading.Lock()  # guards the end of the call
        self._waiting = threading.Lock()  # held by the thread that fetches the value


def limit_after(timeout: float | None, backend: Backend) -> float | None:
    """Return the time on the backend's clock in ``timeout`` seconds; None: no limit."""
    return None if timeout is None else backend.now() + timeout


def seconds_until(limit: float | None, backend: Backend) -> float | None:
    """Return the seconds until ``limit`` on the backend's clock, 0 if it has passed; None: no limit."""
    return None if limit is None else max(0.0, limit - backend.now())


def raisable(error: BaseException) -> BaseException:
    """Return a copy of a kept error to raise, so that the kept error does not gather the frames of its callers."""
    try:
        fresh = copy.copy(error)
        fresh.args = error.args  # a constructor may have made others of them
        fresh.__cause__, fresh.__context__ = error.__cause__, error.__context__
        fresh.__suppress_context__ = error.__suppress_context__
    except Exception:  # not every exception of users can be copied, or changed
        return error
    return fresh if type(fresh) is type(error) else error


class WaitOver(Exception):
    """The end of a wait whose call continues; ``error`` is to be raised to the caller."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Results:
    """Pending results of a call: the references to the outputs of its ranks, by position in the call."""

    def __init__(self, backend: Backend, handles: Sequence[ResultHandle]) -> None:
        self._backend = backend
        self._handles = handles
        self._values = [handle.value for handle in handles]

    def __len__(self) -> int:
        return len(self._handles)

    def fetch(self, timeout: float | None) -> list[Any]:
        """Return the outputs of all ranks.

        Raises:
            FetchFailed: if an output cannot be fetched, as soon as that is known.
            NotReady: if outputs are missing after ``timeout`` seconds.
        """
        return self._backend.fetch(self._values, timeout)

    def awaited(self) -> Sequence[Ref]:
        """Return the references to wait for: all end once every rank has ended, or a rank has failed."""
        return self._values

    def all_ended(self) -> bool:
        """Return whether all ranks have ended; does not wait."""
        return not self._backend.wait(self._values, len(self._values), 0)[1]

    def output(self, position: int) -> Value:
        """Return the output of an ended rank.

        Raises:
            FetchFailed: if the rank failed, or the output was lost.
        """
        return self._backend.fetch([self._values[position]])[0]

    def wait(self, positions: Sequence[int], count: int, timeout: float | None) -> Waited:
        """Wait ``timeout`` seconds at most for ``count`` positions to end; return the ended positions, and the rest."""
        ended, rest = self._backend.wait([self._values[p] for p in positions], count, timeout)
        return [positions[index] for index in ended], [positions[index] for index in rest]

    def pending(self, timeout: float | None = 0.0) -> list[int]:
        """Wait ``timeout`` seconds at most for all ranks; return the positions that have not ended."""
        return self.wait(range(len(self)), len(self), timeout)[1]

    def outcome(self, position: int) -> RankOutcome:
        """Return the outcome of an ended rank."""
        return self._backend.outcome(self._values[position])

    def reference(self, position: int) -> ResultHandle:
        """Return the handle of a rank's output, finished or not, to pass to other calls."""
        return self._handles[position]

    def call_ids(self) -> list[int]:
        """Return the id of the call on each rank."""
        return [self._backend.call_id(value) for value in self._values]

    def disregard(self) -> None:
        """Note that the call is over, and that the outputs of its ranks will not be read; does not wait."""
        self._backend.disregard([ref for handle in self._handles for ref in handle if ref is not None])

    def leave(self) -> None:
        """Note that the call was cancelled, so that the outputs of its ranks are not read; does not wait."""


@dataclass(frozen=True)
class Streaming:
    """Options of the streams of a call.

    ``buffer`` is the maximum number of unread items of a rank; None: no limit. If ``kept``, items are kept after they
    were read, for further readers. If ``by_rows``, items are rows with their indices in the rank's shard.
    """

    buffer: int | None = None
    kept: bool = False
    by_rows: bool = False


@dataclass
class _Part:
    """The stream of a rank: references to its items from index ``first`` on. ``end`` is the last dropped reference."""

    stream: RankStream
    refs: deque[Ref] = field(default_factory=deque)
    first: int = 0
    end: Ref | None = None
    fault: RankFailure | None = None

    def pull(self, count: float = math.inf) -> bool:
        """Take available references until there are ``count``; return whether there are that many."""
        while len(self.refs) < count and (ref := self.stream.take()) is not None:
            self.refs.append(ref)
        return len(self.refs) >= count

    @property
    def last(self) -> Ref | None:
        return self.refs[-1] if self.refs else self.end


class PendingStream(Results):
    """The items of the ranks that stream, and the handles of the other ranks."""

    def __init__(
        self, backend: Backend, parts: Sequence[ResultHandle | RankStream], streaming: Streaming
    ) -> None:
        super().__init__(
            backend, [part if isinstance(part, ResultHandle) else ResultHandle(part.ended) for part in parts]
        )
        self._parts = {p: _Part(part) for p, part in enumerate(parts) if not isinstance(part, ResultHandle)}
        self._lock = threading.RLock()  # a rank's stream must be used by one thread at a time
        self.streaming = streaming
        #: Positions of the ranks whose items are streamed.
        self.positions = tuple(self._parts)
        #: True if the reader has left the stream.
        self.left = False
        #: True if a reader marked a rank as failed.
        self.is_faulty = False

    def leave(self) -> None:
        """Note that the call was cancelled: from now on, waiting for its ranks drops their remaining items."""
        with self._lock:
            self.left = True
            for part in self._parts.values():
                part.stream.leave()
                self._drop(part)

    def _drop(self, part: _Part) -> None:
        """Take and drop the available items, so that the rank can end."""
        part.pull()
        if part.refs and not self.streaming.kept:
            part.end = part.last
            part.refs.clear()

    def wait(self, positions: Sequence[int], count: int, timeout: float | None) -> Waited:
        """Wait as :meth:`Results.wait`. An ended rank may have unread items."""
        backend = self._backend
        limit = limit_after(timeout, backend)
        ended: list[int] = []
        rest = list(positions)
        while True:
            done, rest = super().wait(rest, len(rest), 0) if rest else ([], [])
            ended += done
            seconds = seconds_until(limit, backend)
            if len(ended) >= count or not rest or seconds == 0.0 or backend.immediate:
                return sorted(ended), rest
            refs = [self._values[position] for position in rest]
            if self.left:
                streams = [self._parts[position] for position in rest if position in self._parts]
                with self._lock:
                    for part in streams:
                        self._drop(part)
                refs += [part.stream.coming for part in streams]
            backend.wait(refs, 1, seconds)

    def outcome(self, position: int) -> RankOutcome:
        part = self._parts.get(position)
        if part is None:
            return super().outcome(position)
        if part.fault is not None:
            return RankOutcome(failure=part.fault)
        with self._lock:
            part.pull()
            last = part.last
        outcome = super().outcome(position) if last is None else self._backend.outcome(last)
        return RankOutcome(failure=outcome.value) if isinstance(outcome.value, RankFailure) else outcome

    def fetch(self, timeout: float | None) -> list[Any]:
        """Wait for all ranks; return a list of the items of each rank, None if they are not streamed or not kept."""
        limit = limit_after(timeout, self._backend)
        waiting: Sequence[int] = range(len(self))
        while waiting:
            ended, waiting = self.wait(waiting, 1, seconds_until(limit, self._backend))
            if not all(self.outcome(position).ok for position in ended):
                raise FetchFailed
            if waiting and not ended:
                raise NotReady
        return [self.output(position) for position in range(len(self))]

    def output(self, position: int) -> Value:
        """Return a list of the items of an ended rank, None as for :meth:`fetch`."""
        part = self._parts.get(position)
        if part is None or not self.streaming.kept:
            return None
        with self._lock:
            part.pull()
            refs = list(part.refs)
        return self._backend.fetch(refs)[:-1]

    def disregard(self) -> None:
        with self._lock:
            last = [part.last for part in self._parts.values()]
        values = [value for position, value in enumerate(self._values) if position not in self._parts]
        self._backend.disregard([*values, *(ref for ref in last if ref is not None)])

    def run_to_end(self) -> None:
        """Take all items that come without a wait: ranks that wait for a reader continue, and inline streams end."""
        with self._lock:
            for part in self._parts.values():
                part.pull()

    def fail(self, position: int, fault: RankFailure) -> None:
        """Mark a rank as failed: its items cannot be used."""
        self._parts[position].fault = fault
        self.is_faulty = True

    def at(self, position: int, index: int) -> Ref | None:
        """Return the reference to an item of a rank, None before it arrives. Drop earlier items that are not kept."""
        part = self._parts[position]
        with self._lock:
            while not self.streaming.kept and part.refs and part.first < index:
                part.refs.popleft()
                part.first += 1
            place = index - part.first
            return part.refs[place] if part.pull(place + 1) else None

    def following(self, position: int, index: int, count: int) -> list[Ref]:
        """Return up to ``count`` references to available items after the item at ``index`` of a rank."""
        part = self._parts[position]
        with self._lock:
            first = index + 1 - part.first
            part.pull(first + count)
            return list(islice(part.refs, first, first + count))

    def here(self, places: dict[int, int], silent: list[int], count: int, timeout: float | None) -> list[int]:
        """Wait for items at the indices in ``places``; return the positions whose item may have arrived.

        The wait ends after ``count`` positions. ``silent`` has the positions of ranks whose items are not streamed;
        ended ranks are removed from it.

        Raises:
            FetchFailed: if a silent rank has failed.
            NotReady: if nothing arrived within ``timeout`` seconds.
        """
        parts = self._parts
        with self._lock:
            now = [p for p, index in places.items() if index - parts[p].first < len(parts[p].refs)]
        if now:
            return now
        waiting = [*places, *silent]
        coming = [parts[position].stream.coming for position in places]
        coming += [self._values[position] for position in silent]
        done, _ = self._backend.wait(coming, min(count, len(coming)), timeout)
        if not done:
            raise NotReady
        for position in [waiting[index] for index in done if index >= len(places)]:
            if not self.outcome(position).ok:
                raise FetchFailed
            silent.remove(position)
        return [waiting[index] for index in done if index < len(places)]
