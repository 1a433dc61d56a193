"""The calls of a sync, on the ranks of all groups that take part, as one future."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Ticket
from phalanx.calls.call import Call
from phalanx.calls.call_status import raisable
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
from phalanx.weights.pair_setup import Pair
from phalanx.weights.versions import Moved, WeightsVersion
from phalanx.weights.worker.weight_requests import Arrived, Sent, TookPart
from phalanx.wire.value import Reduced

__all__ = ["PairCalls", "SyncFuture"]

_OTHERS_WITHIN_S = 5.0
_AFTER_A_DEATH_S = 0.5
_TURN_S = 0.2
"""How long one of several calls is waited for before another is looked at: one that failed ends the sync."""


@dataclass(frozen=True, eq=False)
class PairCalls:
    """What was sent for one pair: ``stored`` first, where something goes through the object store.

    ``parts`` are the calls in which ranks take part, of the source's group first, or one of all where source and
    target are roles of one group.
    """

    pair: Pair
    stored: Call | None
    parts: tuple[Call, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """All of them."""
        stored = () if self.stored is None else (self.stored,)
        return (*stored, *self.parts)


class SyncFuture(CallFuture[WeightsVersion]):
    """A sync under way: ``result()`` gives its :class:`WeightsVersion`."""

    __slots__ = ("_all", "_began", "_lock", "_number", "_on_end", "_outcome", "_pairs", "_text")

    def __init__(
        self,
        pairs: Sequence[PairCalls],
        number: int,
        began: float,
        text: str,
        on_end: Callable[[WeightsVersion | BaseException], None],
        lock: threading.RLock,
    ) -> None:
        super().__init__(pairs[-1].parts[-1])
        self._pairs = tuple(pairs)
        self._all = [call for pair in pairs for call in pair.calls]
        self._number = number
        self._began = began
        self._text = text
        self._on_end = on_end
        self._lock = lock
        self._outcome: WeightsVersion | BaseException | None = None

    def result(self, timeout: float | None = None) -> WeightsVersion:
        """Wait for the sync and give the version that arrived.

        Args:
            timeout: seconds to wait at most; when they are over the sync goes on, and can be asked again.

        Raises:
            WorkerDiedError: a rank of one side is gone. The weights of the targets are torn.
            RemoteCallError: also an instance of ``WeightsVerificationError`` (what came is not what was sent),
            ``WeightsTransferError`` (a
                peer was late or gone), ``WeightsError`` (the source's weights were written to, or are of another
                step), or of what code of the user raised.
            CallTimeout: it is not over yet.
        """
        outcome = self._outcome
        if outcome is None:
            found = self._found(timeout)
            with self._lock:
                if self._outcome is None:
                    self._outcome = found
                    self._forget_stored()
                    self._on_end(found)
                outcome = self._outcome
        if not isinstance(outcome, WeightsVersion):
            raise raisable(outcome)
        return outcome

    @property
    def calls(self) -> Sequence[Call]:
        """Its calls, on the ranks of all its groups."""
        return self._all

    def _forget_stored(self) -> None:
        """Let go of the references to what lies in the object store for this sync, however long it is kept itself."""
        self._all = [call for pair in self._pairs for call in pair.parts]
        self._pairs = ()

    def _found(self, timeout: float | None) -> WeightsVersion | BaseException:
        try:
            return self._version(timeout)
        except CallTimeout as error:
            if not all(call.over for call in self._all):
                raise
            return self._cause(error).with_traceback(None)
        except Exception as error:
            return self._cause(error).with_traceback(None)

    def _version(self, timeout: float | None) -> WeightsVersion:
        self._wait_for_all(timeout)
        changed, steps, moved, wire = 0, list[int](), list[Moved](), 0
        for one in self._pairs:
            sent, arrived = _parts_of(one)
            changed = max(changed, _changed(sent))
            wire += sum(part.nbytes for part in sent)
            steps += [part.step for part in sent if part.step is not None]
            moved += arrived
        nbytes = sum(one.nbytes for one in moved)
        seconds = time.monotonic() - self._began
        return WeightsVersion(
            self._number,
            seconds,
            nbytes,
            changed,
            max(steps, default=None),
            tuple(moved),
            wire_bytes=wire,
        )

    def _wait_for_all(self, timeout: float | None) -> None:
        """Until all calls are over, or one has failed, whichever that is.

        Raises:
            CallTimeout: so many seconds are over. Else what the call raises that failed.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while left := [call for call in self._all if not call.over]:
            for call in self._all:
                if call.over:
                    call.result(None)
                    continue
                seconds = max(0.0, min(_TURN_S if len(left) > 1 else math.inf, until - time.monotonic()))
                try:
                    call.result(None if seconds == math.inf else seconds)
                except CallTimeout:
                    if call.over or time.monotonic() >= until:
                        raise
        for call in self._all:
            call.result(None)

    def _cause(self, error: BaseException) -> BaseException:
        """Of all that went wrong, what the rest followed from."""
        errors = [error]
        patience = _AFTER_A_DEATH_S if isinstance(error, WorkerDiedError) else _OTHERS_WITHIN_S
        for call in self._all:
            try:
                call.result(patience)
            except Exception as other:
                errors.append(other)
                if not call.over:
                    call.cancel()  # it waits for ranks that will not come, perhaps for long
        cause = min(errors, key=_rank_of_cause)
        if isinstance(cause, PhalanxError):
            cause = raisable(cause)
            notes: Sequence[str] = getattr(cause, "__notes__", ())
            cause.__dict__["__notes__"] = [*notes, self._text]
        return cause

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the sync to end; what :meth:`result` raises, or None."""
        try:
            self.result(timeout)
        except Exception as error:
            if self._outcome is None:
                raise
            return error
        return None

    def cancel(self) -> bool:
        """End the sync on every rank; see ``CallFuture.cancel``. Weights that were being written are torn then."""
        ended = [call.cancel() for call in self._all]
        return any(ended)

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return any(call.cancelled for call in self._all)

    def done(self) -> bool:
        """Whether every rank has returned, raised or died; does not wait."""
        return all(call.over or call.all_ended() for call in self._all)

    def pending(self, deadline: float | None = None) -> Pending:
        """See ``CallFuture.pending``."""
        refs = [
            call.arrivals.reference(position).value
            for call in self._all
            for position in range(len(call.plan.ranks))
        ]
        return Pending(self.call.life.transport, refs, deadline)

    async def _wait(self) -> WeightsVersion:
        if self._outcome is not None:
            return self.result()
        return await super()._wait()

    def __reduce__(self) -> Reduced:
        raise DeclarationError("the future of a sync is no argument of calls: pass its result(), the version")

    def parts(self, transport: Backend) -> list[Ticket] | None:
        """Its value is made on the driver."""
        return None


def _parts_of(one: PairCalls) -> tuple[list[Sent], list[Moved]]:
    """What the sources sent and what came to the targets, by what the calls gave."""
    sent: list[Sent] = []
    moved: list[Moved] = []
    for call in one.parts:
        outputs: list[TookPart] = call.result(None)
        for rank, took in zip(call.plan.ranks, outputs, strict=True):
            if took.sent is not None:
                sent.append(took.sent)
            if took.arrived is not None:
                moved += _moved(one.pair, rank, took.arrived)
    return sent, moved


def _moved(pair: Pair, rank: int, arrived: Arrived) -> list[Moved]:
    return [
        Moved(pair.source.ranks[source], pair.target.title, rank, mover, nbytes, arrived.seconds)
        for source, mover, nbytes in arrived.by_source
    ]


def _changed(sent: Sequence[Sent]) -> int:
    """Of how many tensors some source sent other values than the last time."""
    return sum(any(marks) for marks in zip(*(one.changed for one in sent), strict=True))


def _rank_of_cause(error: BaseException) -> int:
    order: Iterator[bool] = iter(
        (
            isinstance(error, CallCancelled),
            isinstance(error, WorkerDiedError),
            isinstance(error, WeightsVerificationError),
            isinstance(error, WeightsError) and not isinstance(error, WeightsTransferError),
            not isinstance(error, WeightsTransferError | GroupError | CallTimeout),
            isinstance(error, WeightsTransferError),
        )
    )
    return next((place for place, fits in enumerate(order) if fits), 9)
