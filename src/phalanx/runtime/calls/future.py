"""Results that are not here yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from phalanx.dispatch.plan import CallPlan
from phalanx.errors import CallCancelled, CallTimeout, DeclarationError, DispatchError, PhalanxError
from phalanx.runtime.session.waiters import waiters
from phalanx.tracing.recorder import Draft
from phalanx.transport.base import Ticket, Transport

if TYPE_CHECKING:
    from phalanx.runtime.groups.core import GroupCore

T = TypeVar("T")


class Stream(Iterator[tuple[int, Any]]):
    """``(rank, output)`` of each rank as it finishes; knows how many there are and what of, for ``px.progress``."""

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


class CallFuture(Generic[T]):
    """The result of a call that was submitted.

    ``result()`` waits for it, ``await`` does so in an event loop, ``stream()`` gives each rank's output as it
    comes. Passed as an argument to a method of another group, its bytes go from worker to worker.
    """

    __phalanx_future__ = True
    ended = True  # whether somebody has seen its end; so until it is made
    replicated = False  # debug mode compares its outputs
    draft: Draft | None = None  # what a trace records of it
    metered = False
    expired = False  # its own deadline has passed: the call is over
    stall_report_after: float | None = None
    stall_at: float | None = None
    #: Set while, and once, somebody cancels it: the event tells that the error stands.
    cancelling: threading.Event | None = None
    cancel_error: CallCancelled | None = None

    def __init__(
        self,
        core: GroupCore,
        plan: CallPlan,
        tickets: list[Ticket],
        method: str,
        role: str,
        timeout: float | None,
        target: Any,
        number: int = 0,
    ) -> None:
        self.plan = plan.without_arguments()  # which may be large, and live no longer than the caller wants
        self.tickets = tickets
        self.method = method
        self.role = role
        self.number = number
        self.started = core.now()
        self.deadline = None if timeout is None else self.started + timeout
        self.timeout = timeout
        self.epoch = core.epoch
        self.target = target
        self.ended = False
        self._core = core
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._settled = False
        self._cancel = threading.Lock()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and give it.

        Args:
            timeout: seconds to wait at most; when they are over the call goes on, and can be asked again. (A
                deadline of the call itself, ``.options(timeout=...)``, ends the call.)

        Raises:
            RemoteCallError: code on a rank raised; also an instance of what it raised.
            WorkerDiedError: a rank's process is gone.
            CallTimeout: the result is not here yet.
            GroupClosed, GroupBroken: the group ended before the call did.
        """
        limit = None if timeout is None else self._core.now() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise self._core.not_yet(self, timeout)
        try:
            if not self._settled:
                self._settle(limit, timeout)
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def _settle(self, limit: float | None, timeout: float | None) -> None:
        try:
            self._value = self._core.settle(self, limit)
        except CallTimeout as error:
            if not self.expired:
                raise  # only this wait is over, not the call
            self._error = error
        except Exception as error:
            self._error = error
        self._settled = True
        self.ended = True
        self._core.over(self, self._error)
        self._core.replays.ended(self, self._error is None)

    def cancel(self) -> bool:
        """End the call, and wait until it has ended on every rank.

        A rank that has not begun it drops it; one that is at it is interrupted (in Python code and in collectives
        over sockets; an ``async`` method as any task is). A rank that has not ended its part by itself after the
        grace is stopped, and the group is broken; else the group stays ready. ``result()`` then raises
        ``CallCancelled``, whose ``failures`` say for each rank whether it had not begun, was interrupted, had
        returned or was stopped.

        Returns:
            False if the call was over before: its result, or its error, stands.
        """
        with self._cancel:
            if self._settled or self.cancel_error is not None:
                return self.cancel_error is not None
            self.cancelling = threading.Event()
            try:
                done = self._core.cancel(self)
            finally:
                self.cancelling.set()
        if done:
            with contextlib.suppress(PhalanxError):
                self.result()
        return done

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.cancel_error is not None

    def try_settle(self) -> bool:
        """Settle a call of which the end is known, unless somebody is waiting for it; whether it is settled now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._settled:
                self._settle(self._core.now(), 0.0)
        except CallTimeout:
            return False
        finally:
            self._lock.release()
        return True

    def done(self) -> bool:
        """Whether every rank has returned, raised or died; does not wait."""
        return self._settled or self._core.all_ended(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end; what it raises, or None."""
        try:
            self.result(timeout)
        except Exception as error:
            if not self._settled:
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        if self._settled:
            return self.result()
        return await asyncio.wrap_future(waiters.submit(self.result))

    def stream(self, timeout: float | None = None) -> Stream:
        """``(rank, output)`` of every called rank, in the order in which they finish.

        Raises:
            The same as :meth:`result`, at the first rank that failed.
        """
        role = f".{self.role}" if self.role else ""
        text = f"{self._core.name}{role}.{self.method}"
        return Stream(self._core.stream(self, timeout), len(self.plan.ranks), text)

    @property
    def group(self) -> str:
        """Name of the group."""
        return self._core.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were called."""
        return tuple(self.plan.ranks)

    def parts(self, transport: Transport) -> list[Ticket] | None:
        """Tickets to hand to another rank, which joins them as this call would; None where only the driver can."""
        if self._settled and self._error is not None:
            raise self._error
        if not self._settled:
            self._core.check_epoch(self)
        if transport is not self._core.transport or self.plan.gather.how == "custom":
            return None
        return self.tickets

    def row_parts(self, transport: Transport) -> list[Ticket] | None:
        """Tickets of the parts of a result of rows, in row order; None where it has to come through the driver."""
        tickets = self.parts(transport)
        gather = self.plan.gather
        if tickets is None or gather.how != "rows" or gather.trim is not None or gather.order is not None:
            return None
        parts = [tickets[position] for position in gather.take]
        return parts if all(part.info is not None for part in parts) else None

    def __del__(self) -> None:
        if not self.ended:
            self._core.dropped(self.epoch, self.plan, self.tickets, self.target)

    def __reduce__(self) -> Any:
        raise DeclarationError(
            "a CallFuture belongs to its driver; pass it as an argument of a group's method (its bytes then go from "
            "worker to worker), or send its result()"
        )

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self._settled else "pending"
        return f"<CallFuture {self._core.name}.{self.method} on {len(self.plan.ranks)} ranks: {state}>"


def gather(*futures: CallFuture[Any], timeout: float | None = None) -> list[Any]:
    """The results of several futures, of any groups, in their order.

    Args:
        *futures: what ``.submit()`` gave.
        timeout: seconds to wait for all of them together; the calls go on when they are over.

    Raises:
        PhalanxError: that of the future which fails first, as soon as it does.
        CallTimeout: not all are here in time.
    """
    for future in futures:
        if not isinstance(future, CallFuture):
            raise DispatchError(
                f"px.gather takes futures, as group.method.submit(...) gives them; got {type(future).__name__}"
            )
    waiting = [waiters.submit(future.result, timeout) for future in futures]
    ended, _ = wait(waiting, return_when=FIRST_EXCEPTION)
    for one in waiting:
        if one in ended and (error := one.exception()) is not None:
            raise error
    return [one.result() for one in waiting]
