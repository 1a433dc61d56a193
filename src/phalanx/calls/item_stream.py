"""The items of a call whose method yields, as a caller reads them: in turn, by rank or by row."""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

from phalanx.backends.backend_types import Backend, FetchFailed, NotReady, Ref
from phalanx.calls.call import Call
from phalanx.calls.call_state import PendingStream, WaitOver, limit_after, raisable, seconds_until
from phalanx.config import as_integer
from phalanx.dispatch.plan import CallPlan
from phalanx.display.text_format import first_of
from phalanx.errors import DispatchError, PhalanxError
from phalanx.session.session import session
from phalanx.wire.codec import decoding
from phalanx.wire.failure import RankFailure, capture
from phalanx.wire.messages import StreamEnd, full_name
from phalanx.wire.unpack import received
from phalanx.wire.value import Reduced, Value

Item = TypeVar("Item", covariant=True)

NO_ARGUMENT = (
    "cannot be an argument of a call: only this process can read it. Send items through a px.Channel, which any group "
    "can put to and get from, or pass the items that you read"
)
_ALL = 1 << 30
_AT_ONCE_S = 0.0002
_TOGETHER = 16
_SMALL_BYTES = 64 << 10
_NOTHING = object()
_NOT_YET = object()
_FAILED = object()


class Reader:
    """Reader of the items of all streaming ranks as they arrive, in order for each rank."""

    def __init__(self, arrivals: PendingStream, backend: Backend) -> None:
        self._arrivals = arrivals
        self._backend = backend
        self._places = dict.fromkeys(arrivals.positions, 0)
        self._silent = [position for position in range(len(arrivals)) if position not in self._places]
        self._ready: deque[int] = deque()
        # True while several items may be available: they are all requested at once.
        self._is_behind = True
        # A rank without a buffer limit does not wait for its reader, so small items can be fetched together.
        self._may_fetch_ahead = arrivals.streaming.buffer is None and not backend.immediate
        self._ahead: dict[int, deque[Value]] = {position: deque() for position in self._places}
        self._are_small = False

    def wait(self, timeout: float | None) -> None:
        """Wait until :meth:`take` can return without waiting.

        Raises:
            NotReady: if that takes longer than ``timeout`` seconds.
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
            FetchFailed: if a rank failed, or its item cannot be fetched.
            NotReady: if no item arrives within ``timeout`` seconds.
        """
        while self._places or self._silent:
            if self._arrivals.left or self._arrivals.is_faulty or not self._backend.connected():
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
        if not ahead:
            ahead += self._fetched(position, ref, _TOGETHER - 1 if self._are_small else 0)
        value = ahead.popleft()
        if isinstance(value, RankFailure):
            raise FetchFailed
        if type(value) is StreamEnd:
            del self._places[position]
        else:
            self._places[position] += 1
        return value

    def _fetched(self, position: int, ref: Ref, more: int) -> list[Any]:
        """Fetch an item, with up to ``more`` that follow it; only the item itself if any of these fails."""
        refs = self._arrivals.following(position, self._places[position], more) if more else []
        before = received.nbytes
        try:
            values = self._backend.fetch([ref, *refs])
        except Exception as error:
            if refs:
                return self._fetched(position, ref, 0)
            if isinstance(error, FetchFailed):  # the rank may have continued after an unreadable item
                failure = self._backend.outcome(ref).failure
                if failure is not None and failure.report.rank < 0:
                    self._arrivals.fail(position, failure)
            raise
        nbytes = received.nbytes - before + sum(len(one) for one in values if isinstance(one, bytes | str))
        self._are_small = self._may_fetch_ahead and nbytes <= _SMALL_BYTES * len(values)
        return values


class StreamedRows:
    """Maps rows that ranks yield, as ``(index in its shard, result)``, to their places among the caller's rows. Pure.

    Results of padded rows are dropped.
    """

    def __init__(self, plan: CallPlan) -> None:
        gather, rows = plan.gather, plan.gather.rows or ()
        ranks = [plan.ranks[position] for position in gather.take]
        given = rows if gather.trim is None else [padded for padded, _ in gather.trim]
        self._rows = dict(zip(ranks, rows, strict=True))
        self._given = dict(zip(ranks, given, strict=True))
        self._starts = dict(zip(ranks, accumulate(rows, initial=0), strict=False))
        self._order = gather.order
        self._seen: dict[int, set[int]] = {rank: set() for rank in ranks}

    def receive(self, rank: int, item: Any) -> tuple[int, Any] | None:
        """Return the place among the caller's rows, and the result, of an item of a rank; None for a padded row.

        Raises:
            ValueError: if the item is not a row of the rank's shard, or repeats a row.
        """
        index = as_integer(item[0]) if isinstance(item, tuple) and len(item) == 2 else None
        if index is None:
            raise ValueError(
                f"it yielded {reprlib.repr(item)}: yield (index of the row in its shard, result)"
            )
        given = self._given[rank]
        if not 0 <= index < given:
            raise ValueError(f"it yielded row {index} of a shard of {given} rows: count from 0")
        if index in self._seen[rank]:
            raise ValueError(f"it yielded row {index} of its shard twice: yield every row once")
        self._seen[rank].add(index)
        if index >= self._rows[rank]:
            return None
        place = self._starts[rank] + index
        return place if self._order is None else int(self._order[place]), item[1]

    def finish(self, rank: int) -> None:
        """Check the rows of a rank that has ended.

        Raises:
            ValueError: if a row of its shard is missing.
        """
        missing = sorted(set(range(self._rows[rank])) - self._seen[rank])
        if missing:
            raise ValueError(
                f"it ended without {len(missing)} of the {self._rows[rank]} rows of its shard ({first_of(missing)}): "
                "yield every row once"
            )


class ItemStream(Iterator[Item], AsyncIterator[Item], Generic[Item]):
    """The items of a call whose method yields: an iterator, async iterator and context manager.

    Items of a rank come in order, and items of several ranks as they are made. Leaving the stream before its end, by
    ``with``, ``close()`` or by dropping it, cancels the call, except for a stream of ``CallFuture.stream``.

    Args:
        call: the call that streams. The items of a single rank are returned without the rank, rows as ``(index in the
            call, result)``, and other items as ``(rank, item)``.
        owner: if True, the call ends with this stream.
        timeout: seconds for all items; None: no limit.
    """

    def __init__(self, call: Call, *, owner: bool, timeout: float | None = None) -> None:
        self.call = call
        self._arrivals = arrivals = cast(PendingStream, call.arrivals)
        self._alone = call.plan.gather.collect == "first"
        self._rows = StreamedRows(call.plan) if arrivals.streaming.by_rows else None
        self._owner = owner
        self._reader = Reader(arrivals, call.core.backend)
        self._limit = limit_after(timeout, call.core.backend)
        self._lock = threading.Lock()  # held by the thread that takes an item
        self._over = False
        self._failure: BaseException | None = None
        self._waiting: Future[Any] | None = None  # on a thread, perhaps for a reader that has given up

    @property
    def description(self) -> str:
        """Group and method, for ``px.debug.progress``."""
        return f"{self.call.group}.{full_name(self.call.role, self.call.method)}"

    def __next__(self) -> Item:
        """Wait for the next item and return it.

        Raises:
            StopIteration: if all ranks have ended, or the stream was closed.
            Errors of ``CallFuture.result``: if a rank fails, as soon as it does; then the call is over.
        """
        with self._lock:
            found = self._guarded(self._next)
        if found is _NOTHING:
            raise StopIteration
        return found

    def __aiter__(self) -> ItemStream[Item]:
        return self

    async def __anext__(self) -> Item:
        """Await the next item and return it. An item is taken only when it can be returned."""
        while True:
            if self._waiting is None or self._waiting.done():  # else for a cancelled await, or another reader
                found = self._guarded(self._poll)
                if found is not _NOT_YET:
                    break
                self.call.listener.asked(self.call)
                self._waiting = session.waiters.submit(partial(_wait, self.call, self._reader, self._limit))
            waiting = asyncio.wrap_future(self._waiting)
            waiting.add_done_callback(
                asyncio.Future.exception
            )  # else asyncio logs an error that nobody reads
            await asyncio.wait([waiting])
            self._guarded(waiting.result)
        if found is _FAILED:
            # This finds the cause of the failure, which may take long.
            found = await asyncio.wrap_future(session.waiters.submit(lambda: self._guarded(self._next)))
        if found is _NOTHING:
            raise StopAsyncIteration
        return found

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Return the result of ``work()``, or ``_NOTHING`` once the stream is over.

        An error ends the stream and its call. Ctrl-C leaves the stream.
        """
        if not self._over:
            try:
                return work()
            except WaitOver as over:
                raise over.error from None
            except Exception as error:
                self._end(error.with_traceback(None))
            except BaseException:
                # Ctrl-C, which ends a generator, too. Nobody else may leave the stream: a traceback can keep it alive.
                self.close()
                raise
        if self._failure is not None:
            raise raisable(self._failure)  # the group may keep the error, but not the reader's frames
        return _NOTHING

    def _end(self, failure: BaseException | None) -> None:
        if self._over:  # it was closed in the meantime
            return
        self._over, self._failure = True, failure
        if self._owner:
            self.call.end_with(failure)
        else:
            self.call.tell_end(failure)

    def _next(self) -> Any:
        call, found = self.call, _NOT_YET
        call.listener.asked(call)
        if self._limit is None and call.deadline is None and self._is_current:
            with contextlib.suppress(FetchFailed):  # the failure is diagnosed below
                while found is _NOT_YET:
                    found = self._take(None)
        while found is _NOT_YET:
            call.check()
            found = call.attempt(self._taken, self._limit)
        return found

    @property
    def _is_current(self) -> bool:
        call = self.call
        return call.error is None and call.core.epoch.has_kept(call.plan.ranks, call.epoch)

    def _taken(self, until: float | None) -> Any:
        call = self.call
        seconds = seconds_until(until, call.core.backend)
        if seconds == 0.0 and until == call.deadline:
            raise NotReady  # even if there are items: the ranks would continue to make them
        return self._take(seconds)

    def _take(self, timeout: float | None) -> Any:
        """Return an item as the caller gets it; ``_NOT_YET`` as in :meth:`_item`, ``_NOTHING`` after all items."""
        call = self.call
        with decoding(meter=call.meter):
            found = self._reader.take(timeout)
        if found is None:
            self._end(None)
            return _NOTHING
        position, value = found
        rank = call.plan.ranks[position]
        if type(value) is StreamEnd:
            call.listener.arrived(call, rank)
        try:
            return self._item(rank, value)
        except ValueError as fault:
            self._arrivals.fail(position, capture(ValueError(str(fault))))
            raise FetchFailed from None

    def _item(self, rank: int, value: Any) -> Any:
        """Return an item of a rank as the caller gets it; ``_NOT_YET`` for the end of a rank, or a padded row."""
        rows = self._rows
        if type(value) is StreamEnd:
            if rows is not None:
                rows.finish(rank)
            return _NOT_YET
        if rows is not None:
            row = rows.receive(rank, value)
            return _NOT_YET if row is None else row
        return value if self._alone else (rank, value)

    def _poll(self) -> Any:
        """Return an available item, else ``_NOT_YET``; ``_FAILED`` if the call has to be checked. Do not wait."""
        found = _NOT_YET
        if not self._is_current or seconds_until(self.call.deadline, self.call.core.backend) == 0.0:
            return _FAILED
        try:
            while found is _NOT_YET:
                found = self._take(0.0)
        except NotReady:
            pass
        except FetchFailed:
            found = _FAILED
        return found

    def close(self) -> None:
        """Leave the stream. If the stream made its call, cancel it, and wait until all ranks have ended. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._owner:
            leave(self.call)

    def __enter__(self) -> ItemStream[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> ItemStream[Item]:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._over:
            await asyncio.wrap_future(session.waiters.submit(self.close))

    def __del__(self) -> None:
        # not set if the constructor failed
        if sys.is_finalizing() or getattr(self, "_over", True):
            return
        if self._owner:
            self._over = True
            if self.call.core.backend.immediate:
                leave(self.call)
            else:  # it takes time
                session.queue.add(leave, self.call)

    def __reduce__(self) -> Reduced:
        raise DispatchError(f"the stream of {self.description} {NO_ARGUMENT}")

    def __repr__(self) -> str:
        return f"<ItemStream {self.description}: {'over' if self._over else 'running'}>"


def _wait(call: Call, reader: Reader, limit: float | None) -> None:
    """Wait for an item, on a thread. The thread does not keep the stream alive, so that dropping it ends the call."""
    call.check()
    call.attempt(lambda until: reader.wait(seconds_until(until, call.core.backend)), limit)


def leave(call: Call) -> None:
    """Cancel a call that streams, and wait until it has ended on its ranks."""
    with contextlib.suppress(PhalanxError):  # its group was closed, or its ranks were replaced
        call.cancel()
    # Ray aborts the process at a stream of another cluster.
    if call.streams is not None and call.core.backend.connected():
        call.streams.leave()
    call.end_with(None)  # if all ranks had ended, and only items were unread
