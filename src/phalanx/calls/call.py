"""A call in progress: waits for its ranks, streams of outputs, cancellation and its end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from phalanx.backends.backend_types import FetchFailed, NotReady
from phalanx.calls.call_state import CallInfo, PendingStream, WaitOver, limit_after, raisable, seconds_until
from phalanx.calls.diagnosis import (
    CANCELLED_WITHIN_S,
    CallOutcome,
    Diagnosis,
    decide,
    not_yet,
    outcome_of_failure,
    outcome_when_late,
)
from phalanx.collect.join import gather, trimmed
from phalanx.errors import CallCancelled, CallTimeout, DeclarationError, PhalanxError, StaleEpoch
from phalanx.group.group import Group
from phalanx.session.session import session
from phalanx.tracing.metric_buffer import meters
from phalanx.wire.codec import decoding
from phalanx.wire.messages import full_name
from phalanx.wire.value import Value

T = TypeVar("T")
_log = logging.getLogger("phalanx")
_REFUSED = f"{DeclarationError.__module__}.{DeclarationError.__qualname__}"


class Call(CallInfo):
    """A call from its plan to its end, shared by its future, its streams and the monitor."""

    core: Group

    @property
    def group(self) -> str:
        """Name of the group."""
        return self.core.name

    @property
    def streams(self) -> PendingStream | None:
        """The pending items if the call streams, else None."""
        return self.arrivals if isinstance(self.arrivals, PendingStream) else None

    @property
    def cancelled(self) -> bool:
        """True if the call was cancelled."""
        return isinstance(self.error, CallCancelled)

    # Listener and counts

    def note_sent(self, nbytes: int) -> None:
        """Note that all messages of the call were sent, ``nbytes`` bytes in total."""
        self.was_sent = True
        if self.acts:
            for counts in (self.core.counts, session.counts):
                counts.calls += 1
                counts.sent_bytes += nbytes
        self.listener.sent(self, nbytes)

    def tell_end(self, error: BaseException | None) -> None:
        """Report the end of the call, once, to its group, the counts and its listener."""
        if self.told:
            return
        self.told = True
        core = self.core
        core.forget(self)
        if core.reruns.entries:
            core.reruns.ended(self, error)
        if self.acts and error is not None and self.was_sent:
            for counts in (core.counts, session.counts):
                counts.failed += 1
        if self.acts and meters.on and not core.backend.immediate:
            seconds = core.backend.now() - self.started
            meters.ended(core.name, full_name(self.role, self.method), seconds, error is not None)
        try:
            self.listener.ended(self, error)
        except Exception as failure:  # the end of a call matters more than its trace
            _log.warning(
                "the trace lacks the end of %s of group %r", self.method, self.group, exc_info=failure
            )

    # Outputs

    def result(self, timeout: float | None) -> Value:
        """Wait for the call to end; return its value or raise its error. Both are kept.

        Raises:
            CallTimeout: if the call has not ended after ``timeout`` seconds, or its own deadline ended it.
        """
        if not self.over:
            self._conclude(timeout)
        if self.error is not None:
            raise raisable(self.error)
        return self.value

    def conclude_now(self) -> None:
        """End the call if its outcome is known or its deadline has passed, unless another thread waits for it."""
        with contextlib.suppress(CallTimeout):
            self._conclude(0.0, wait_for_others=False)

    def _conclude(self, timeout: float | None, *, wait_for_others: bool = True) -> None:
        limit = limit_after(timeout, self.core.backend)
        patience = -1 if timeout is None or not wait_for_others else timeout
        if not self._waiting.acquire(wait_for_others, patience):
            if wait_for_others:
                raise not_yet(self, timeout)
            return
        try:
            if self.over:
                return
            self.listener.asked(self)
            try:
                self.check()
                value = self.attempt(self._joined, limit)
            except WaitOver as over:
                raise over.error from None
            except Exception as error:
                # Kept without its frames, which would keep the call and the caller's arguments alive.
                self.end_with(error.with_traceback(None))
            else:
                self._end(value)
        finally:
            self._waiting.release()

    def attempt(self, work: Callable[[float | None], T], limit: float | None) -> T:
        """Return ``work(until)``. If it fails or is late, decide the outcome of the call and apply it.

        A call that its rank refused is sent again first, if that is possible. ``until`` is the earlier of ``limit`` and
        the call's deadline.

        Raises:
            WaitOver: if ``limit`` has passed and the call continues.
            BaseException: the error of the call, if it failed.
        """
        until = self.deadline
        if until is None or (limit is not None and limit < until):
            until = limit
        while True:
            is_late, cause = False, None
            try:
                return work(until)
            except NotReady:
                is_late = True
            except FetchFailed as failed:
                # Without its frames, which would keep this frame alive.
                cause = failed.__cause__ and failed.__cause__.with_traceback(None)
            # Outside the except block: otherwise the old error, with its frames, would be the context of the new error.
            resend = self.resend  # a cancellation may remove it
            if not is_late and resend is not None and resend(self):
                continue
            ending = outcome_when_late(self, limit) if is_late else outcome_of_failure(self, cause)
            self.act(ending)
            if ending.error is not None:
                raise (ending.error if ending.over else WaitOver(ending.error)) from None
            until = None  # all ranks have ended by now

    def check(self) -> None:
        """Check that the call has not failed and that its ranks were not replaced.

        Raises:
            StaleEpoch: if a rank of the call was replaced.
            BaseException: the error of the call, if it failed.
        """
        if self.error is not None:
            raise raisable(self.error)
        if self.core.epoch is not self.epoch:
            self.core.check_current(self.epoch, self.plan.ranks, self.method)

    def _joined(self, until: float | None) -> Value:
        """Fetch and join the outputs. Outputs whose rows are joined are decoded as views."""
        with decoding(readonly=self.copies, meter=self.meter):
            outputs = self.arrivals.fetch(seconds_until(until, self.core.backend))
        return self._join(outputs)

    def _join(self, outputs: Sequence[Any]) -> Value:
        met = self.meter
        if met is not None:
            for output in outputs:
                if type(output) is bytes or type(output) is str:  # sent without being encoded
                    met.add(len(output))
        self.listener.arrived(self, None)
        if self.verify is not None:
            self.verify(self, outputs)
        try:
            return gather(self.plan.gather, outputs, self.collector)
        except (StopIteration, StopAsyncIteration) as error:  # it would silently end a loop of the caller
            raise RuntimeError(f"the collect function of {self.method} raised {error!r}") from error

    def conclude_with(self, outputs: Sequence[Any]) -> None:
        """End the call with outputs that were fetched in a batch with other calls."""
        with self._waiting:
            if self.over:
                return
            try:
                self.check()
                self._end(self._join(outputs))
            except Exception as error:
                self.end_with(error.with_traceback(None))

    def stream(self, limit: float | None) -> Iterator[tuple[int, Any]]:
        """Yield ``(rank, output)`` in the order in which ranks finish. Raise the errors of :meth:`result`.

        ``limit`` is the end of the wait on the backend's clock; None: no limit.
        """
        pending = list(range(len(self.plan.ranks)))
        failure: BaseException | None = None
        self.listener.asked(self)
        try:
            self.check()
            while pending:
                yield self.attempt(lambda until: self._next_output(pending, until), limit)
        except WaitOver as over:
            raise over.error from None
        except Exception as error:
            failure = error.with_traceback(None)
        self.tell_end(failure)
        if failure is not None:
            raise raisable(failure)  # the group may keep the error, but not the reader's frames

    def _next_output(self, pending: list[int], until: float | None) -> tuple[int, Any]:
        done, _ = self.arrivals.wait(pending, 1, seconds_until(until, self.core.backend))
        if not done:
            raise NotReady
        with decoding(meter=self.meter):
            output = self.arrivals.output(done[0])
        pending.remove(done[0])
        take, trim = self.plan.gather.take, self.plan.gather.trim
        if trim is not None and done[0] in take:
            output = trimmed(output, *trim[take.index(done[0])])
        rank = self.plan.ranks[done[0]]
        self.listener.arrived(self, rank)
        return rank, output

    def answers(self, timeout: float | None) -> dict[int, Any]:
        """Wait at most ``timeout`` seconds; return the output or the error of each rank.

        The error is ``NotReady`` for a rank that has not ended, ``DeclarationError`` for a rank that refused the
        request, else a ``PhalanxError`` with the reason.
        """
        late = self.arrivals.pending(timeout)
        diagnosis = Diagnosis(self)
        found: dict[int, Any] = {}
        for position, rank in enumerate(self.plan.ranks):
            if position in late:
                found[rank] = NotReady(f"rank {rank} has not responded: it is running a call")
            elif (report := diagnosis.report(position)) is None:
                found[rank] = self.arrivals.output(position)
            else:
                error = DeclarationError if report.type_name == _REFUSED else PhalanxError
                found[rank] = error(f"rank {rank}: {report.message}")
        return found

    def all_ended(self) -> bool:
        """Return whether the call is over, or all ranks have ended it; does not wait."""
        return self.over or self.arrivals.all_ended()

    def has_failed(self) -> bool:
        """Return whether a rank is known to have failed; does not wait."""
        pending = self.arrivals.pending()
        return not all(self.arrivals.outcome(p).ok for p in range(len(self.plan.ranks)) if p not in pending)

    def touches(self, ranks: Sequence[int]) -> bool:
        """Return whether a called rank of ``ranks`` has not ended the call, or failed in it."""
        touched = [position for position, rank in enumerate(self.plan.ranks) if rank in ranks]
        pending = self.arrivals.pending()
        return any(p in pending or not self.arrivals.outcome(p).ok for p in touched)

    # End

    def act(self, ending: CallOutcome) -> None:
        """Apply an outcome: stop ranks, break the group, or note that its owner has closed it."""
        if not self.acts:
            return
        core, epoch = self.core, self.epoch
        if isinstance(ending.error, StaleEpoch):
            core.is_doubtful = True  # a view reads the roster before its next call
        epoch.stopped.update(ending.stop)
        if ending.closes:
            core.begin_close()
            core.finish_close()
        elif ending.breaks and isinstance(ending.error, PhalanxError):
            core.broken(ending.error, epoch)
        if ending.stop:  # last, so that calls that fail with these ranks find the cause
            core.backend.kill([epoch.endpoints[rank] for rank in ending.stop])

    def cancel(self) -> bool:
        """Cancel the call; see ``CallFuture.cancel``. Return False if it was over before."""
        if not self.cancels.acquire(timeout=CANCELLED_WITHIN_S):
            return self.cancelled
        try:
            if self.over:
                return self.cancelled
            self.resend = None  # not even if its rank has refused it
            self.core.check_current(self.epoch, self.plan.ranks, self.method)
            ending = decide(Diagnosis(self).observe_cancel())
            self.act(ending)
            return ending.error is not None and self.end_with(ending.error) and self.cancelled
        finally:
            self.cancels.release()

    def end_with(self, error: BaseException | None) -> bool:
        """End the call with an error; None: after its last item. Return False if it was over before."""
        return self._end(None, error)

    def _end(self, value: Value, error: BaseException | None = None) -> bool:
        with self._lock:
            if self.over:
                return False
            self.value, self.error, self.over = value, error, True
        self.tell_end(error)
        if error is not None:
            self.arrivals.disregard()
        return True
