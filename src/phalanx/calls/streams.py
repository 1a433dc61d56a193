"""Results of a call that streams: items of its ranks as they are made, and how each rank ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from phalanx.backends.backend_types import (
    Backend,
    FetchFailed,
    NotReady,
    RankOutcome,
    RankStream,
    Ref,
    Ticket,
)
from phalanx.calls.call_state import Results
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import StreamEnd
from phalanx.wire.unpack import received
from phalanx.wire.value import Value, as_integer

_ALL = 1 << 30
_AT_ONCE_S = 0.0002
_TOGETHER = 16
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Streaming:
    """Options of the streams of a call.

    ``buffer`` is the most unread items that a rank makes; None: any number. If ``kept``, items stay after they were
    read, for further readers. ``positions`` are the ranks whose items are streamed.
    """

    positions: frozenset[int]
    buffer: int | None = None
    kept: bool = False


@dataclass
class _Part:
    """The stream of a rank: its references from index ``first`` on; ``end`` is the last reference, once it arrived."""

    stream: RankStream
    refs: deque[Ref] = field(default_factory=deque[Ref])
    first: int = 0
    end: Ref | None = None
    fault: RankFailure | None = None

    def pull(self) -> bool:
        """Take the next reference if it is there; whether it was."""
        ref = self.stream.take()
        if ref is None:
            return False
        self.refs.append(ref)
        return True


class PendingStream(Results):
    """The items of the ranks that stream, and the tickets of the other ranks."""

    def __init__(self, backend: Backend, parts: Sequence[Ticket | RankStream], streaming: Streaming) -> None:
        super().__init__(
            backend, [part if isinstance(part, Ticket) else Ticket(part.ended) for part in parts]
        )
        self._parts = {p: _Part(part) for p, part in enumerate(parts) if not isinstance(part, Ticket)}
        self._lock = threading.RLock()  # a rank's stream must be used by one thread at a time
        self._left = False
        self.is_faulty = False
        self.streaming = streaming

    @property
    def left(self) -> bool:
        """True if the reader has left the stream."""
        return self._left

    def leave(self) -> None:
        """Note that the call was cancelled: from now on, waiting for its ranks drops their remaining items."""
        with self._lock:
            self._left = True
            for part in self._parts.values():
                part.stream.leave()
                self._drop(part)

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        """Return the positions that have ended, and the rest. Items made for a reader need not have been read."""
        backend = self._backend
        limit = None if timeout is None else backend.now() + timeout
        ended: list[int] = []
        rest = list(positions)
        while True:
            done, left = backend.wait([self._values[p] for p in rest], len(rest), 0) if rest else ([], [])
            ended, rest = ended + [rest[index] for index in done], [rest[index] for index in left]
            seconds = None if limit is None else max(0.0, limit - backend.now())
            if len(ended) >= count or not rest or seconds == 0.0 or backend.immediate:
                return sorted(ended), rest
            self._wait_for_one(rest, seconds)

    def _wait_for_one(self, positions: Sequence[int], seconds: float | None) -> None:
        refs = [self._values[position] for position in positions]
        if self._left:
            streams = [self._parts[position] for position in positions if position in self._parts]
            with self._lock:
                for part in streams:
                    self._drop(part)
            refs += [part.stream.coming for part in streams]
        self._backend.wait(refs, 1, seconds)

    def _drop(self, part: _Part) -> None:
        """Take and drop the available items, so that the rank can end."""
        while part.pull():
            pass
        if part.refs and not self.streaming.kept:
            part.end = part.refs[-1]
            part.refs.clear()

    def outcome(self, position: int) -> RankOutcome:
        part = self._parts.get(position)
        if part is None:
            return self._backend.outcome(self._values[position])
        if part.fault is not None:
            return RankOutcome(failure=part.fault)
        with self._lock:
            while part.pull():
                pass
            last = part.refs[-1] if part.refs else part.end
        outcome = self._backend.outcome(self._values[position] if last is None else last)
        return RankOutcome(failure=outcome.value) if isinstance(outcome.value, RankFailure) else outcome

    def fetch(self, timeout: float | None) -> list[Any]:
        """Return the items of each rank as a list, once all ranks have ended; None for items that are not kept."""
        limit = None if timeout is None else self._backend.now() + timeout
        waiting: Sequence[int] = range(len(self))
        while waiting:
            seconds = None if limit is None else max(0.0, limit - self._backend.now())
            ended, waiting = self.wait(waiting, 1, seconds)
            if not all(self.outcome(position).ok for position in ended):
                raise FetchFailed
            if waiting and not ended:
                raise NotReady
        return [self.output(position) for position in range(len(self))]

    def output(self, position: int) -> Value:
        """The items of an ended rank."""
        part = self._parts.get(position)
        if part is None or not self.streaming.kept:
            return None
        with self._lock:
            while part.pull():
                pass
            refs = list(part.refs)
        return self._backend.fetch(refs)[:-1]

    def fetched_with_others(self) -> None:
        return None

    def all_ended(self) -> bool:
        everyone = range(len(self._tickets))
        return not self.wait(everyone, len(everyone), 0)[1]

    def disregard(self) -> None:
        last = [part.refs[-1] if part.refs else part.end for part in self._parts.values()]
        values = [ticket.value for p, ticket in enumerate(self._tickets) if p not in self._parts]
        self._backend.disregard([*values, *(ref for ref in last if ref is not None)])

    def run_to_end(self) -> None:
        """Take all items now, if ranks continue only when their items are taken."""
        with self._lock:
            for part in self._parts.values():
                while part.pull():
                    pass

    def fail(self, position: int, fault: RankFailure) -> None:
        """Mark this rank's part as failed: its items are of no use."""
        self._parts[position].fault = fault
        self.is_faulty = True

    def at(self, position: int, index: int) -> Ref | None:
        """Return the reference of an item of a rank, if it arrived. Drops earlier items that are not kept."""
        part = self._parts[position]
        with self._lock:
            if not self.streaming.kept:
                while part.refs and part.first < index:
                    part.refs.popleft()
                    part.first += 1
            place = index - part.first
            while place >= len(part.refs):
                if not part.pull():
                    return None
            return part.refs[place]

    def following(self, position: int, index: int, count: int) -> list[Ref]:
        """Return up to ``count`` references that have arrived after the item at ``index`` of a rank."""
        part = self._parts[position]
        with self._lock:
            first = index + 1 - part.first
            while len(part.refs) < first + count and part.pull():
                pass
            return list(islice(part.refs, first, first + count))

    def ended_with(self, position: int, ref: Ref) -> None:
        """Note the last reference of a rank."""
        self._parts[position].end = ref

    def here(self, places: dict[int, int], silent: list[int], count: int, timeout: float | None) -> list[int]:
        """Return up to ``count`` positions whose item, at the index in ``places``, may have arrived.

        ``silent`` are ranks whose items are not streamed; the ranks that have ended are removed from it.

        Raises:
            FetchFailed: a silent rank has failed.
            NotReady: time is up.
        """
        with self._lock:
            now = [
                p for p, index in places.items() if index - self._parts[p].first < len(self._parts[p].refs)
            ]
        if now:
            return now
        waiting = [*places, *silent]
        coming = [self._parts[position].stream.coming for position in places]
        coming += [self._values[position] for position in silent]
        done, _ = self._backend.wait(coming, min(count, len(coming)), timeout)
        if not done:
            raise NotReady
        for position in [waiting[index] for index in done if index >= len(places)]:
            if not self.outcome(position).ok:
                raise FetchFailed
            silent.remove(position)
        return [waiting[index] for index in done if index < len(places)]


class Reader:
    """Reads the items of all ranks that stream, in turn, each rank's in order."""

    def __init__(self, arrivals: PendingStream, backend: Backend) -> None:
        self._arrivals = arrivals
        self._backend = backend
        self._places = dict.fromkeys(sorted(arrivals.streaming.positions), 0)
        self._silent = [position for position in range(len(arrivals)) if position not in self._places]
        self._ready: deque[int] = deque()
        # Several items may be there: all are asked for at once, as often as that is so.
        self._is_behind = True
        # Taking items does not let a rank without a buffer limit continue, so small items are fetched together.
        self._may_fetch_ahead = arrivals.streaming.buffer is None and not backend.immediate
        self._ahead: dict[int, deque[Value]] = {position: deque() for position in self._places}
        self._are_small = False

    def wait(self, timeout: float | None) -> None:
        """Wait until :meth:`take` has something to say.

        Raises:
            NotReady: time is up.
        """
        while (self._places or self._silent) and not self._ready:
            if self._is_behind or timeout == 0.0:
                try:
                    self._ready.extend(self._arrivals.here(self._places, self._silent, _ALL, 0))
                    continue
                except NotReady:
                    self._is_behind = False
                    if timeout == 0.0:
                        raise
            began = time.perf_counter()
            self._ready.extend(self._arrivals.here(self._places, self._silent, 1, timeout))
            self._is_behind = time.perf_counter() - began < _AT_ONCE_S

    def take(self, timeout: float | None) -> tuple[int, Any] | None:
        """Return the next item with the position of its rank.

        At the end of a rank, return its position with a ``StreamEnd``; after the end of all ranks, None.

        Raises:
            FetchFailed: a rank failed, or its item cannot be fetched.
            NotReady: time is up.
        """
        while self._places or self._silent:
            if self._arrivals.left or self._arrivals.is_faulty:
                raise FetchFailed
            self.wait(timeout)
            position = self._ready.popleft() if self._ready else None
            if position is None or position not in self._places:
                continue
            ref = self._arrivals.at(position, self._places[position])
            if ref is not None:
                return position, self._value(position, ref)
        return None

    def _value(self, position: int, ref: Ref) -> Value:
        ahead = self._ahead[position]
        if not ahead and self._are_small:
            ahead += self._fetched_together(position, ref)
        value = ahead.popleft() if ahead else self._fetched(position, ref)
        if isinstance(value, RankFailure):
            raise FetchFailed
        if type(value) is StreamEnd:
            self._arrivals.ended_with(position, ref)
            del self._places[position]
        else:
            self._places[position] += 1
        return value

    def _fetched(self, position: int, ref: Ref) -> Value:
        before = received.nbytes
        try:
            value = self._backend.fetch([ref])[0]
        except FetchFailed:
            self._failed(position, ref)
            raise
        nbytes = len(value) if isinstance(value, bytes | str) else received.nbytes - before
        self._are_small = self._may_fetch_ahead and nbytes <= _SMALL_BYTES
        return value

    def _fetched_together(self, position: int, ref: Ref) -> list[Any]:
        """Fetch the item and its successors together. Empty if any of them fails: each is then fetched in turn."""
        refs = self._arrivals.following(position, self._places[position], _TOGETHER - 1)
        before = received.nbytes
        try:
            values = self._backend.fetch([ref, *refs])
        except Exception:
            self._are_small = False
            return []
        nbytes = received.nbytes - before + sum(len(one) for one in values if isinstance(one, bytes | str))
        self._are_small = nbytes <= _SMALL_BYTES * len(values)
        return values

    def _failed(self, position: int, ref: Ref) -> None:
        """Note why: the rank itself may have gone on after an item that cannot be read."""
        self._arrivals.ended_with(position, ref)
        outcome = self._backend.outcome(ref)
        if outcome.failure is not None and outcome.failure.report.rank < 0:
            self._arrivals.fail(position, outcome.failure)


class RowFault(ValueError):
    """A rank broke the rule of ``stream(by="rows")``: every row of its piece once."""


class StreamedRows:
    """Puts rows that ranks yield individually, as ``(index in its shard, result)``, at their places in the call. Pure.

    Args:
        rows: of each piece, in order of the pieces.
        ranks: the rank that streams each piece, aligned with ``rows``.
        given: rows of each piece with its padding; results of padded rows are dropped. None: no padding.
        order: place of row j of the joined pieces among the caller's rows; None: j.
    """

    def __init__(
        self,
        rows: Sequence[int],
        ranks: Sequence[int],
        given: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._rows = dict(zip(ranks, rows, strict=True))
        self._given = dict(zip(ranks, given or rows, strict=True))
        self._starts = dict(zip(ranks, accumulate(rows, initial=0), strict=False))
        self._order = order
        self._seen: dict[int, set[int]] = {rank: set() for rank in ranks}

    def receive(self, rank: int, item: Any) -> tuple[int, Any] | None:
        """Return the place among the caller's rows, and the result, of an item of a rank; None for a padded row.

        Raises:
            RowFault: the item is no row of the rank's piece, or came before.
        """
        index = as_integer(item[0]) if isinstance(item, tuple) and len(item) == 2 else None
        if index is None:
            raise RowFault(f"it yielded {_described(item)}: yield (index of the row in its piece, result)")
        given = self._given[rank]
        if not 0 <= index < given:
            raise RowFault(f"it yielded row {index} of a piece of {given} rows: count from 0")
        if index in self._seen[rank]:
            raise RowFault(f"it yielded row {index} of its piece twice: yield every row once")
        self._seen[rank].add(index)
        if index >= self._rows[rank]:
            return None
        place = self._starts[rank] + index
        return place if self._order is None else int(self._order[place]), item[1]

    def finish(self, rank: int) -> None:
        """Note that a rank yields no more.

        Raises:
            RowFault: a row of its piece is missing.
        """
        missing = sorted(set(range(self._rows[rank])) - self._seen[rank])
        if missing:
            shown = ", ".join(str(index) for index in missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise RowFault(
                f"it ended without {len(missing)} of the {self._rows[rank]} rows of its piece ({shown}): yield every"
                " row once"
            )


def _described(item: Any) -> str:
    if isinstance(item, tuple):
        return f"a tuple of {len(item)} ({', '.join(type(each).__name__ for each in item[:4])})"
    return f"a {type(item).__name__}"
