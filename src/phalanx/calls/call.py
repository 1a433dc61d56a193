"""An in-flight call: it waits for its ranks, streams, cancels and ends, in a single loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from phalanx.backends.backend_types import FetchFailed, NotReady
from phalanx.calls.call_outcome import CallOutcome, decide
from phalanx.calls.call_state import (
    UNDER_WAY,
    CallState,
    Cancelling,
    Raised,
    Returned,
    Status,
    WaitOver,
    raisable,
)
from phalanx.calls.diagnosis import (
    CANCELLED_WITHIN_S,
    Diagnosis,
    earliest,
    not_yet,
    outcome_of_failure,
    outcome_when_late,
    seconds_until,
)
from phalanx.calls.streams import PendingStream
from phalanx.collect.join import gather
from phalanx.errors import CallCancelled, CallTimeout, DeclarationError, PhalanxError, StaleEpoch
from phalanx.group.roster import note_change
from phalanx.wire.codec import Policy, decoding
from phalanx.wire.value import Value

T = TypeVar("T")
_REFUSED = f"{DeclarationError.__module__}.{DeclarationError.__qualname__}"


class Call(CallState):
    """A call that is waited for, read as a stream, cancelled, and ended once."""

    __slots__ = ()

    @property
    def streams(self) -> PendingStream | None:
        """Its items, where it streams."""
        return self.arrivals if isinstance(self.arrivals, PendingStream) else None

    def result(self, timeout: float | None) -> Value:
        """Wait, then return its value or raise its error; both are kept.

        Raises:
            CallTimeout: ``timeout`` seconds are over, and the call is not; or its own deadline ended it.
        """
        if not self.over:
            self._conclude(timeout)
        status = self.status
        if isinstance(status, Raised):
            raise raisable(status.error)
        return status.value if isinstance(status, Returned) else None

    def conclude_now(self) -> bool:
        """Bring a call to its end of which that is known, unless somebody waits for it; whether it is over."""
        try:
            self._conclude(0.0, wait_for_others=False)
        except CallTimeout:
            return False
        return self.over

    def _conclude(self, timeout: float | None, *, wait_for_others: bool = True) -> None:
        limit = None if timeout is None else self.core.backend.now() + timeout
        patience = -1 if timeout is None else timeout
        if not self._waiting.acquire(wait_for_others, patience if wait_for_others else -1):
            if wait_for_others:
                raise not_yet(self, timeout)
            return
        try:
            if not self.over:
                self._end(self._value_or_error(limit))
        finally:
            self._waiting.release()

    def _value_or_error(self, limit: float | None) -> Returned | Raised:
        """Raises CallTimeout where only this wait is over."""
        try:
            return Returned(next(self.follow(self._joined, limit)))
        except WaitOver as over:
            raise over.error from None
        except Exception as error:
            # Kept without the frames that it passed through, which would hold the call, and the caller's arguments.
            return Raised(error.with_traceback(None))

    def answers(self, timeout: float | None) -> dict[int, Any]:
        """Wait at most ``timeout`` seconds, and return the output of each rank; an error of a rank is returned.

        A rank without an output has an error in its place: ``NotReady`` if it has not ended, ``DeclarationError`` if it
        refused the request, else a ``PhalanxError`` with its reason.
        """
        positions = range(len(self.plan.ranks))
        _, late_positions = self.arrivals.wait(positions, len(positions), timeout)
        diagnosis = Diagnosis(self)
        found: dict[int, Any] = {}
        for position, rank in enumerate(self.plan.ranks):
            if position in late_positions:
                found[rank] = NotReady(f"rank {rank} has not answered: it is at a call")
            elif (report := diagnosis.report(position)) is None:
                found[rank] = self.arrivals.output(position)
            else:
                error = DeclarationError if report.type_name == _REFUSED else PhalanxError
                found[rank] = error(f"rank {rank}: {report.message}")
        return found

    def stream(self, timeout: float | None) -> Iterator[tuple[int, Any]]:
        """``(rank, output)`` as they come. Raises as :meth:`result` does."""
        limit = None if timeout is None else self.core.backend.now() + timeout
        given: set[int] = set()
        failure: BaseException | None = None
        try:
            yield from self.follow(lambda until: self._one_by_one(until, given), limit)
        except WaitOver as over:
            raise over.error from None
        except Exception as error:
            failure = error.with_traceback(None)
        self.tell_end(failure)
        if failure is not None:
            raise raisable(failure)  # the group may keep the error, but not the reader's frames

    def follow(self, attempt: Callable[[float | None], Iterator[T]], limit: float | None) -> Iterator[T]:
        """Yield from ``attempt(until)``; where that fails, find out how the call ends and act on it."""
        self.tell_asked()
        self._check()
        until = limit if self.deadline is None else earliest(limit, self.deadline)
        while True:
            is_late = False
            try:
                yield from attempt(until)
                return
            except NotReady:
                is_late = True
            except FetchFailed:
                pass
            # Outside the except block: otherwise the new error would keep the old, and so its frames, as its context.
            ending = outcome_when_late(self, limit) if is_late else outcome_of_failure(self)
            self.act(ending)
            if ending.error is not None:
                raise (ending.error if ending.over else WaitOver(ending.error)) from None
            until = None  # all ranks have ended by now

    def _check(self) -> None:
        """Check that the call has not failed and belongs to the present ranks."""
        status = self.status
        if isinstance(status, Raised):
            raise raisable(status.error)
        if self.core.epoch is not self.epoch:
            self.core.check_current(self.epoch, self.plan.ranks, self.method)

    def _joined(self, until: float | None) -> Iterator[Any]:
        """The value, decoded straight into its place where rows are joined."""
        with decoding(self.decodes, meter=self.meter):
            outputs = self.arrivals.fetch(None if until is None else seconds_until(until, self.core.backend))
        yield self._join(outputs)

    @property
    def decodes(self) -> Policy:
        """The memory in which its outputs are decoded: rows are copied when they are joined."""
        return Policy.VIEW if self.plan.gather.collect == "join" else Policy.PRIVATE

    def _join(self, outputs: Sequence[Any]) -> Value:
        heard, met = self.heard, self.meter
        if met is not None:
            for output in outputs:
                if type(output) is bytes or type(output) is str:  # these come as they are, not encoded
                    met.add(len(output))
        if heard.arrived:
            self.tell(heard.arrived, None)
        if self.verify is not None:
            self.verify(self, outputs)
        value = gather(self.plan.gather, outputs, self.collector)
        if heard.joined:
            self.tell(heard.joined)
        return value

    def conclude_with(self, outputs: Sequence[Any]) -> None:
        """End the call with outputs that were fetched in a batch with other calls."""
        with self._waiting:
            if self.over:
                return
            try:
                self._check()
                self._end(Returned(self._join(outputs)))
            except Exception as error:
                self._end(Raised(error.with_traceback(None)))

    def has_failed(self) -> bool:
        """Return whether a rank is known to have failed; does not wait."""
        everyone = range(len(self.plan.ranks))
        ended = self.arrivals.wait(everyone, len(everyone), 0)[0]
        return not all(self.arrivals.outcome(position).ok for position in ended)

    def _one_by_one(self, until: float | None, given: set[int]) -> Iterator[tuple[int, Any]]:
        pending = [position for position in range(len(self.plan.ranks)) if position not in given]
        while pending:
            done, pending = self.arrivals.wait(pending, 1, seconds_until(until, self.core.backend))
            if not done:
                raise NotReady
            for position in done:
                with decoding(meter=self.meter):
                    output = self.arrivals.output(position)
                given.add(position)
                rank = self.plan.ranks[position]
                if self.heard.arrived:
                    self.tell(self.heard.arrived, rank)
                yield rank, output

    def act(self, ending: CallOutcome) -> None:
        """Apply an outcome: stop ranks, break the group, or note that its owner has closed it."""
        if not self.acts:
            return
        core, epoch = self.core, self.epoch
        if isinstance(ending.error, StaleEpoch) and core.is_view:
            note_change(core)
        epoch.stopped.update(ending.stop)
        if ending.closes:
            core.begin_close()
            core.finish_close()
        elif ending.breaks and isinstance(ending.error, PhalanxError):
            core.broken(ending.error, epoch)
        if ending.stop:  # last: what goes down with these ranks is to find the cause, and no call to follow
            core.backend.kill([epoch.endpoints[rank] for rank in ending.stop])

    def cancel(self) -> bool:
        """End it; see ``CallFuture.cancel``. False if it was over before."""
        mine = Cancelling(threading.Event())
        if not self._move(mine, UNDER_WAY):
            status = self.status
            if isinstance(status, Cancelling):  # another thread cancels it
                status.over.wait(CANCELLED_WITHIN_S)
            return self.cancelled
        try:
            return self._cancel()
        finally:
            self._move(UNDER_WAY, mine)  # where it is not over
            mine.over.set()

    def _cancel(self) -> bool:
        self.core.check_current(self.epoch, self.plan.ranks, self.method)
        seen = Diagnosis(self).observe_cancel()
        ending = CallOutcome(over=False) if seen is None else decide(seen)
        self.act(ending)
        return ending.error is not None and self._end(Raised(ending.error)) and self.cancelled

    @property
    def cancelled(self) -> bool:
        """True if it was cancelled."""
        status = self.status
        return isinstance(status, Raised) and isinstance(status.error, CallCancelled)

    def all_ended(self) -> bool:
        """Return whether no rank is still at it; does not wait."""
        return self.arrivals.all_ended()

    def touches(self, ranks: Sequence[int]) -> bool:
        """Return whether the call failed on a rank of ``ranks`` because the rank died. Returned ranks do not count."""
        for position, rank in enumerate(self.plan.ranks):
            if rank in ranks:
                ended = self.arrivals.wait([position], 1, 0)[0]
                if not ended or not self.arrivals.outcome(position).ok:
                    return True
        return False

    def _move(self, to: Status, since: Status) -> bool:
        with self._lock:
            if self.status is not since:
                return False
            self.status = to
            return True

    def end_with(self, error: BaseException | None) -> None:
        """End the call with the error that the reader of its items saw, if any."""
        self._end(Returned(None) if error is None else Raised(error))

    def _end(self, status: Returned | Raised) -> bool:
        """Note how it ended; False if that stands already."""
        with self._lock:
            if self.over:
                return False
            self.status = status
        if isinstance(status, Raised):
            self.arrivals.disregard()
        self.tell_end(status.error if isinstance(status, Raised) else None)
        return True
