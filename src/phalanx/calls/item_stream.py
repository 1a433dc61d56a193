"""The items of a call whose method yields, as a caller reads them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from phalanx.backends.backend_types import FetchFailed, NotReady
from phalanx.calls.call import Call
from phalanx.calls.call_state import Raised, WaitOver, raisable
from phalanx.calls.diagnosis import seconds_until
from phalanx.calls.streams import PendingStream, Reader, RowFault, StreamedRows
from phalanx.errors import DispatchError, PhalanxError
from phalanx.session.session import session
from phalanx.wire.codec import decoding
from phalanx.wire.failure import capture
from phalanx.wire.messages import StreamEnd
from phalanx.wire.value import Reduced

Item = TypeVar("Item", covariant=True)

NO_ARGUMENT = (
    "is no argument of a call: whoever reads it is one process, this one. Hand items on with a px.Channel, which any "
    "group can put to and get from, or pass what you read"
)
_NOTHING = object()
_NOT_YET = object()
_FAILED = object()


class ItemStream(Iterator[Item], AsyncIterator[Item], Generic[Item]):
    """The items of a call whose method yields: an iterator, async iterator and context manager.

    Items of a rank come in order, and items of several ranks as they are made. Leaving the stream before its end, by
    ``with``, ``close()`` or by dropping it, cancels the call, except for a stream of ``CallFuture.stream``.

    Args:
        call: the call that streams.
        arrivals: its items.
        alone: if True, a single rank was called: its items are returned without the rank.
        rows: places of the rows that the ranks yield, for ``(index in the call, result)``; None for ``(rank, item)``.
        owner: if True, the call ends with this stream.
        timeout: seconds for all items; None: no limit.
    """

    def __init__(
        self,
        call: Call,
        arrivals: PendingStream,
        *,
        alone: bool,
        owner: bool,
        rows: StreamedRows | None = None,
        timeout: float | None = None,
    ) -> None:
        self.call = call
        self._arrivals = arrivals
        self._alone, self._rows = alone, rows
        self._owner = owner
        self._reader = Reader(arrivals, call.core.backend)
        self._limit = None if timeout is None else call.core.backend.now() + timeout
        self._lock = threading.Lock()  # held by the thread that takes an item
        self._asked = False
        self._over = False
        self._failure: BaseException | None = None

    @property
    def description(self) -> str:
        """Group and method, for ``px.debug.progress``."""
        role = f".{self.call.role}" if self.call.role else ""
        return f"{self.call.group}{role}.{self.call.method}"

    def __next__(self) -> Item:
        """The next item, waiting for it.

        Raises:
            StopIteration: all ranks have ended, or the stream was left.
            Errors of ``CallFuture.result``, as soon as a rank fails; then the call is over.
        """
        with self._lock:
            found = self._guarded(self._next)
        if found is _NOTHING:
            raise StopIteration
        return found

    def __aiter__(self) -> ItemStream[Item]:
        return self

    async def __anext__(self) -> Item:
        """The same without blocking the event loop; an item is taken only when it can be given."""
        found = self._guarded(self._poll)
        while found is _NOT_YET:
            await self._elsewhere(self._wait)
            found = self._guarded(self._poll)
        if found is _FAILED:
            found = await self._elsewhere(self._next)  # finds the cause of the failure
        if found is _NOTHING:
            raise StopAsyncIteration
        return found

    async def _elsewhere(self, work: Callable[[], Any]) -> Any:
        """Do it on a thread of its own."""
        return await asyncio.wrap_future(session.waiters.submit(functools.partial(self._guarded, work)))

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Do it, unless the stream is over; an error ends it, and the call with it, once and for all."""
        if not self._over:
            try:
                return work()
            except WaitOver as over:
                raise over.error from None
            except Exception as error:
                self._end(error.with_traceback(None))
        if self._failure is not None:
            raise raisable(self._failure)  # the group may keep the error, but not the reader's frames
        return _NOTHING

    def _end(self, failure: BaseException | None) -> None:
        if self._over:  # it was left meanwhile
            return
        self._over, self._failure = True, failure
        if self._owner:
            self.call.end_with(failure)
        else:
            self.call.tell_end(failure)

    def _next(self) -> Any:
        call, found = self.call, _NOT_YET
        if not self._asked:
            self._asked = True
            call.tell_asked()
        if self._limit is None and call.deadline is None and self._is_current:
            with contextlib.suppress(FetchFailed):  # the failure is diagnosed below
                while found is _NOT_YET:
                    found = self._take(None)
        while found is _NOT_YET:
            found = next(call.follow(self._taken, self._limit))
        return found

    @property
    def _is_current(self) -> bool:
        return self.call.core.epoch is self.call.epoch and not isinstance(self.call.status, Raised)

    def _taken(self, until: float | None) -> Iterator[Any]:
        call = self.call
        seconds = None if until is None else seconds_until(until, call.core.backend)
        if seconds == 0.0 and until == call.deadline:
            raise NotReady  # also where there are items: the ranks would go on making them
        yield self._take(seconds)

    def _take(self, timeout: float | None) -> Any:
        """An item as the caller gets it; ``_NOT_YET`` where there was something else."""
        call = self.call
        with decoding(meter=call.meter):
            found = self._reader.take(timeout)
        if found is None:
            self._end(None)
            return _NOTHING
        position, value = found
        rank = call.plan.ranks[position]
        if type(value) is StreamEnd and call.heard.arrived:
            call.tell(call.heard.arrived, rank)
        try:
            return self._item(rank, value)
        except RowFault as fault:
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
        """Return an item that is there, without waiting; ``_FAILED`` where a look at the call is needed."""
        deadline, found = self.call.deadline, _NOT_YET
        if not self._is_current or (deadline is not None and self.call.core.backend.now() >= deadline):
            return _FAILED
        try:
            while found is _NOT_YET:
                found = self._take(0.0)
        except NotReady:
            pass
        except FetchFailed:
            found = _FAILED
        return found

    def _wait(self) -> None:
        next(self.call.follow(self._waited, self._limit))

    def _waited(self, until: float | None) -> Iterator[None]:
        self._reader.wait(None if until is None else seconds_until(until, self.call.core.backend))
        yield None

    def close(self) -> None:
        """Leave it: the call is cancelled, where this stream made it, and has ended on every rank. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._owner:
            leave(self.call)

    def __enter__(self) -> ItemStream[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> ItemStream[Item]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._over:
            await asyncio.wrap_future(session.waiters.submit(self.close))

    def __del__(self) -> None:
        # not set if the constructor failed
        if sys.is_finalizing() or getattr(self, "_over", True):
            return
        if self._owner:
            self._over = True
            leave_soon(self.call)

    def __reduce__(self) -> Reduced:
        raise DispatchError(f"the stream of {self.description} {NO_ARGUMENT}")

    def __repr__(self) -> str:
        return f"<ItemStream {self.description}: {'over' if self._over else 'under way'}>"


def leave(call: Call) -> None:
    """Cancel a call that streams, and wait until it has ended on its ranks."""
    with contextlib.suppress(PhalanxError):  # its group, or its epoch, is gone: then so is the call
        call.cancel()
    if call.streams is not None:
        call.streams.leave()
    call.end_with(None)  # where it was over on all ranks, and only its items had not been read


def leave_soon(call: Call) -> None:
    """Cancel the call of a stream that was garbage-collected; in the background if that takes time."""
    if call.core.backend.immediate:
        leave(call)
    else:
        session.queue.add(leave, call)
