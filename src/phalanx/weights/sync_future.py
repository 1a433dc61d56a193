"""The future of a sync: the calls on the ranks of all its groups as a single call."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from phalanx.backends.backend_types import Backend, Ticket
from phalanx.calls.call import Call
from phalanx.calls.call_state import raisable
from phalanx.calls.future import CallFuture
from phalanx.errors import (
    CallCancelled,
    CallTimeout,
    DeclarationError,
    GroupError,
    PhalanxError,
    WeightsError,
    WeightsTransferError,
    WeightsVerificationError,
    WorkerDiedError,
)
from phalanx.session.wait_threads import Pending
from phalanx.weights.sync_pairs import SyncPair
from phalanx.weights.versions import Transfer, WeightsVersion
from phalanx.weights.weight_requests import Sent
from phalanx.wire.value import Reduced

_GRACE_S = 5.0
_GRACE_AFTER_DEATH_S = 0.5
_TURN_S = 0.2
"""Seconds to wait for a call before looking at another call: a call that failed ends the sync."""


class SyncFuture(CallFuture[WeightsVersion]):
    """A running sync: ``result()`` returns its :class:`WeightsVersion`.

    Args:
        parts: the pairs, each with its calls.
        number: the version.
        began: start of the sync on the monotonic clock.
        text: note for errors.
        on_end: called once with the version or the error, while ``lock`` is held.
    """

    __slots__ = ("_began", "_lock", "_number", "_on_end", "_outcome", "_parts", "_text", "calls")

    def __init__(
        self,
        parts: Sequence[tuple[SyncPair, Sequence[Call]]],
        number: int,
        began: float,
        text: str,
        on_end: Callable[[WeightsVersion | BaseException], None],
        lock: threading.RLock,
    ) -> None:
        super().__init__(parts[-1][1][-1])
        self._parts = tuple(parts)
        self.calls = [call for _, calls in parts for call in calls]
        self._number = number
        self._began = began
        self._text = text
        self._on_end = on_end
        self._lock = lock
        self._outcome: WeightsVersion | BaseException | None = None

    def result(self, timeout: float | None = None) -> WeightsVersion:
        """Wait for the sync and return the version that arrived.

        Args:
            timeout: maximum seconds to wait. The sync continues afterwards.

        Raises:
            WorkerDiedError: if a rank of a side died. The weights of the targets are torn.
            RemoteCallError: also an instance of ``WeightsVerificationError`` (tensors differ from the source's),
                ``WeightsTransferError`` (a peer was late or lost), ``WeightsError`` (the source's weights were written
                to, or are of another step), or of an exception in the user's code.
            CallTimeout: if the sync is not over yet.
        """
        outcome = self._outcome
        if outcome is None:
            found = self._find_outcome(timeout)
            with self._lock:
                if self._outcome is None:
                    self._outcome = found
                    self._parts = ()
                    self._on_end(found)
                outcome = self._outcome
        if not isinstance(outcome, WeightsVersion):
            raise raisable(outcome)
        return outcome

    def _find_outcome(self, timeout: float | None) -> WeightsVersion | BaseException:
        try:
            self._wait_for_all(timeout)
            return self._version()
        except CallTimeout as error:
            if not all(call.over for call in self.calls):
                raise
            return self._cause(error).with_traceback(None)
        except Exception as error:
            return self._cause(error).with_traceback(None)

    def _version(self) -> WeightsVersion:
        changed, steps, moved, wire_bytes = 0, list[int](), list[Transfer](), 0
        for pair, calls in self._parts:
            marks: dict[int, bytes] = {}
            seconds: dict[int, float] = {}
            for call in calls:
                responses: list[tuple[Sent | None, float | None]] = call.result(None)
                for rank, (sent, receiving) in zip(call.plan.ranks, responses, strict=True):
                    if sent is not None:
                        marks[rank] = sent.changed
                        wire_bytes += sent.nbytes
                        steps += [] if sent.step is None else [sent.step]
                    if receiving is not None:
                        seconds[rank] = receiving
            moved += pair.transfers(list(marks), seconds)
            # a tensor changed if some source has other values than the last time
            changed = max(changed, sum(any(bits) for bits in zip(*marks.values(), strict=True)))
        nbytes, total = sum(one.nbytes for one in moved), time.monotonic() - self._began
        step = max(steps, default=None)
        return WeightsVersion(self._number, total, nbytes, changed, step, tuple(moved), wire_bytes)

    def _wait_for_all(self, timeout: float | None) -> None:
        """Wait until all calls are over, or a call that was not over fails.

        Raises:
            CallTimeout: if the time is over. Otherwise the error of the call that failed.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while left := [call for call in self.calls if not call.over]:
            for call in left:
                seconds = max(0.0, min(_TURN_S if len(left) > 1 else math.inf, until - time.monotonic()))
                try:
                    call.result(None if seconds == math.inf else seconds)
                except CallTimeout:
                    if call.over or time.monotonic() >= until:
                        raise

    def _cause(self, error: BaseException) -> BaseException:
        """Return the error from which the others followed."""
        errors = [error]
        grace = _GRACE_AFTER_DEATH_S if isinstance(error, WorkerDiedError) else _GRACE_S
        for call in self.calls:
            try:
                call.result(grace)
            except Exception as other:
                errors.append(other)
                if not call.over:
                    call.cancel()  # it waits for ranks that will not come, perhaps for long
        cause = min(errors, key=_precedence)
        if isinstance(cause, PhalanxError):
            cause = raisable(cause)
            notes: Sequence[str] = getattr(cause, "__notes__", ())
            cause.__dict__["__notes__"] = [*notes, self._text]
        return cause

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the sync to end and return the error that :meth:`result` raises, or None."""
        try:
            self.result(timeout)
        except Exception as error:
            if self._outcome is None:
                raise
            return error
        return None

    def cancel(self) -> bool:
        """End the sync on every rank; see ``CallFuture.cancel``. Weights that were being written are torn then."""
        ended = [call.cancel() for call in self.calls]  # every call, also after one that ended
        return any(ended)

    def cancelled(self) -> bool:
        """Return whether the sync was cancelled."""
        return any(call.cancelled for call in self.calls)

    def done(self) -> bool:
        """Return whether every rank has returned, raised or died, without waiting."""
        return all(call.over or call.all_ended() for call in self.calls)

    def pending(self, deadline: float | None = None) -> Pending:
        """Return the references that a wait for the end is for."""
        refs = [ref for call in self.calls for ref in call.arrivals.awaited()]
        return Pending(self.call.core.backend, refs, deadline)

    async def _wait(self) -> WeightsVersion:
        if self._outcome is not None:
            return self.result()
        return await super()._wait()

    def __reduce__(self) -> Reduced:
        raise DeclarationError("the future of a sync is no argument of calls: pass its result(), the version")

    def parts(self, backend: Backend) -> list[Ticket] | None:
        """Return None: the value is made on the driver."""
        return None


def _precedence(error: BaseException) -> int:
    """Return a number that is lower the more likely the error caused the others."""
    is_transfer = isinstance(error, WeightsTransferError)
    order = (
        isinstance(error, CallCancelled),
        isinstance(error, WorkerDiedError),
        isinstance(error, WeightsVerificationError),
        isinstance(error, WeightsError) and not is_transfer,
        not is_transfer and not isinstance(error, GroupError | CallTimeout),
        is_transfer,
    )
    return order.index(True) if True in order else len(order)
