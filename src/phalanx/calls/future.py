"""Futures of submitted calls, and waits for several futures."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from itertools import islice
from typing import Any, Generic, TypeVar

from phalanx.backends.backend_types import Backend, FetchFailed, NotReady, Ref, ResultHandle
from phalanx.calls.call import Call
from phalanx.calls.call_state import limit_after, raisable, seconds_until
from phalanx.calls.item_stream import NO_ARGUMENT, ItemStream
from phalanx.errors import CallTimeout, DeclarationError, DispatchError
from phalanx.session.session import session
from phalanx.session.wait_threads import Pending
from phalanx.wire.codec import decoding
from phalanx.wire.messages import full_name
from phalanx.wire.value import Reduced, Value, checked_timeout

T = TypeVar("T")


class Stream(Iterator[tuple[int, Any]]):
    """Iterator over ``(rank, output)`` as ranks finish. ``px.debug.progress`` reads its length and description."""

    def __init__(self, inner: Iterator[tuple[int, Any]], total: int, description: str) -> None:
        self._inner = inner
        self._left = total
        self.description = description

    def __next__(self) -> tuple[int, Any]:
        item = next(self._inner)
        self._left -= 1
        return item

    def __length_hint__(self) -> int:
        return self._left


class Awaited(Generic[T]):
    """Base class of futures that ``px.gather`` accepts."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it."""
        raise NotImplementedError

    def pending(self, deadline: float | None = None) -> Pending | None:
        """Return the references whose end makes the result available; None: a thread has to wait for it."""
        return None


class CallFuture(Awaited[T]):
    """The result of a call that was submitted.

    ``result()`` waits for it, and ``await`` does so in an event loop. ``stream()`` returns the output of each rank when
    it arrives. If the future is an argument of another call, the bytes go from worker to worker.
    """

    __phalanx_future__ = True
    __slots__ = ("__weakref__", "call")

    def __init__(self, call: Call) -> None:
        self.call = call

    @property
    def __phalanx_rows__(self) -> int | None:
        """Number of rows of a result that is a list by rank, known before it arrives; None for other results."""
        gather = self.call.plan.gather
        return len(gather.take) if gather.collect == "list" else None

    @property
    def _is_over(self) -> bool:
        """True if the result or the error is known here."""
        return self.call.over

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Args:
            timeout: seconds to wait; None: no limit. The call then continues, and its result can be requested again. (A
                deadline of the call itself, ``.options(timeout=...)``, ends the call.)

        Raises:
            RemoteCallError: if code on a rank raised; also an instance of the raised exception's class.
            WorkerDiedError: if a rank's process died.
            CallTimeout: if the result has not arrived in time.
            CallCancelled: if the call was cancelled.
            StaleEpoch: if ranks of the call were replaced or restarted before it ended.
            GroupClosed, GroupBroken: if the group was closed or broke before the call ended.
        """
        return self.call.result(checked_timeout(timeout, "CallFuture.result"))

    def cancel(self) -> bool:
        """End the call, and wait until it has ended on every rank.

        A rank that has not begun the call drops it; a rank that runs it is interrupted (in Python code and in
        collectives over sockets; an ``async`` method like any task). If a rank has not ended after the grace period,
        its collectives are aborted, it is stopped if it still runs, and the group is broken; else the group stays
        ready. ``result()`` then raises ``CallCancelled``, whose ``failures`` say for each rank whether it had not
        begun, was interrupted, had returned or was stopped.

        Returns:
            False if the call was over before: its result, or its error, stays.
        """
        return self.call.cancel()

    def cancelled(self) -> bool:
        """Return whether the call was cancelled."""
        return self.call.cancelled

    def done(self) -> bool:
        """Return whether every rank has returned, raised or died; does not wait."""
        return self.call.all_ended()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end; return its error, or None.

        Raises:
            CallTimeout: if the call has not ended after ``timeout`` seconds.
        """
        timeout = checked_timeout(timeout, "CallFuture.exception")
        try:
            self.result(timeout)
        except Exception as error:
            if isinstance(error, CallTimeout) and not self._is_over:
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        if self._is_over:
            return self.result()
        return await asyncio.wrap_future(session.waiters.submit(self.result, self.pending()))

    def pending(self, deadline: float | None = None) -> Pending:
        """Return the references whose end makes the result available."""
        call = self.call
        return Pending(call.core.backend, call.arrivals.awaited(), deadline)

    def stream(self, timeout: float | None = None) -> Stream | ItemStream[Any]:
        """Return an iterator over ``(rank, output)`` of every called rank, in the order in which they finish.

        The output is None for a rank whose output is not in the result, such as all ranks of a dp coordinate but one.

        If the method yields, the iterator returns its items as the ranks make them: ``(rank, item)``, or only the items
        if a single rank was called. The items are kept, so that ``result()`` works too, and leaving the stream does not
        affect the call.

        Raises:
            Errors of :meth:`result`: if a rank failed, or the ranks have not ended after ``timeout`` seconds.
        """
        call, timeout = self.call, checked_timeout(timeout, "CallFuture.stream")
        if call.streams is not None:
            return ItemStream(call, owner=False, timeout=timeout)
        description = f"{call.group}.{full_name(call.role, call.method)}"
        return Stream(call.stream(limit_after(timeout, call.core.backend)), len(call.plan.ranks), description)

    @property
    def group(self) -> str:
        """Name of the group."""
        return self.call.group

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were called."""
        return tuple(self.call.plan.ranks)

    def parts(self, backend: Backend) -> list[ResultHandle] | None:
        """Return the handles of the outputs, for ranks to join them as this call would; None if only the driver can."""
        call = self.call
        self.refuse_stream()
        if call.error is not None:
            raise raisable(call.error)
        if not call.over:
            call.core.check_current(call.epoch, call.plan.ranks, call.method)
        if backend is not call.core.backend or callable(call.plan.gather.collect):
            return None
        return [call.arrivals.reference(position) for position in range(len(call.plan.ranks))]

    def refuse_stream(self) -> None:
        """Check that the future may be an argument.

        Raises:
            DispatchError: if its call streams.
        """
        if self.call.streams is not None:
            raise DispatchError(f"the stream of {self.call.group}.{self.call.method} {NO_ARGUMENT}")

    def settled(self) -> T:
        """Return the result, for a call that needs the value of this argument before it is sent.

        Raises:
            DispatchError: if the call of this future streams.
        """
        self.refuse_stream()
        return self.result()

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a CallFuture belongs to its driver; pass it as an argument of a group's method (its bytes then go from "
            "worker to worker), or send its result()"
        )

    def __repr__(self) -> str:
        call = self.call
        state = "pending" if not self._is_over else "done" if call.error is None else "failed"
        return f"<CallFuture {call.group}.{call.method} on {len(call.plan.ranks)} ranks: {state}>"


def gather(*futures: Awaited[Any], timeout: float | None = None) -> list[Any]:
    """Return the results of several futures, of any groups, in their order.

    Args:
        *futures: futures of methods (``.submit()``) and of saves.
        timeout: seconds to wait for all of them together; None: no limit. The calls then continue.

    Raises:
        PhalanxError: if a future fails: the first error, as soon as it is known.
        CallTimeout: if some results have not arrived in time.
        DispatchError: if an argument is not a future.
    """
    for future in futures:
        if not isinstance(future, Awaited):
            raise DispatchError(
                f"px.gather takes futures, as returned by group.method.submit(...); got {type(future).__name__}"
            )
    timeout = checked_timeout(timeout, "px.gather")
    calls = [one.call for one in futures if isinstance(one, CallFuture) and one.__phalanx_future__]
    if len(calls) < len(futures) or not together(calls, timeout):
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = [
            session.waiters.submit(functools.partial(_result_by, future, deadline), future.pending(deadline))
            for future in futures
        ]
        ended, _ = wait(waiting, return_when=FIRST_EXCEPTION)
        for one in waiting:
            if one in ended:
                one.result()
    return [future.result() for future in futures]


def _result_by(future: Awaited[Any], deadline: float | None) -> Value:
    return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))


def together(calls: Sequence[Call], timeout: float | None) -> bool:
    """Wait until all calls are over; return False if they cannot be fetched together.

    Raises:
        PhalanxError: if a call fails: its error, as soon as it fails.
        CallTimeout: if some calls have not ended after ``timeout`` seconds.
    """
    refs = _refs_of(calls)
    if refs is None:
        return False
    for call in calls:
        call.listener.asked(call)
    first, backend = calls[0], calls[0].core.backend
    limit = limit_after(timeout, backend)
    try:
        with decoding(readonly=first.copies, meter=first.meter):
            outputs = iter(backend.fetch(refs, timeout))
    except (NotReady, FetchFailed):  # the error is that of a call; the other calls continue
        for call in calls:
            if call.resend is None and call.has_failed():
                call.result(None)
        for call in calls:
            call.result(seconds_until(limit, backend))
        return False
    for call in calls:
        call.conclude_with(list(islice(outputs, len(call.plan.ranks))))
    return True


def _refs_of(calls: Sequence[Call]) -> list[Ref] | None:
    """Return the references of all outputs; None if each call must be waited for separately."""
    if len(calls) < 2:
        return None
    core, copies = calls[0].core, calls[0].copies
    for call in calls:
        is_alone = call.over or call.deadline is not None or call.streams is not None
        if is_alone or call.core is not core or call.copies != copies:
            return None
    return [ref for call in calls for ref in call.arrivals.awaited()]
