"""How calls end: with their values, with one error, at their deadline, or because somebody cancels them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from phalanx.collect.failures import combine
from phalanx.config import settings
from phalanx.errors import CallTimeout, GroupClosed, PhalanxError, StaleEpoch, WorkerDiedError
from phalanx.runtime.calls.counts import Book, process
from phalanx.runtime.calls.future import CallFuture
from phalanx.runtime.calls.repeats import Replays
from phalanx.runtime.calls.watch import FetchFailed, NotReady, Watch, earliest, settled_value
from phalanx.runtime.life.lifecycle import State
from phalanx.runtime.life.state import GroupRecord, GroupState
from phalanx.show.meters import meters
from phalanx.tracing.recorder import tracing
from phalanx.transport.base import Endpoint, Ticket, Transport
from phalanx.wire.board import SETUP_CALL
from phalanx.wire.codec import Policy

_SEVERED_WITHIN_S = 0.5
_CANCELLED_WITHIN_S = 10.0
_FIRST_NUMBER = 1 << 16


class Settling(GroupState):
    """The part of a group that sees its calls to their ends."""

    def __init__(
        self, record: GroupRecord, transport: Transport, endpoints: list[Endpoint], owner: bool
    ) -> None:
        super().__init__(record, transport, endpoints, owner)
        self._settings = settings()
        self.book = Book(process)
        # Not from 1: several processes may call one group, and its ranks tell the calls apart by number.
        self._numbers = itertools.count(secrets.randbits(40) * _FIRST_NUMBER + _FIRST_NUMBER)
        self.replays = Replays()
        if not transport.immediate:
            meters.watch(record.name, self.book.counts)
        #: Fetches what profiles and recordings have gathered, within so many seconds; called before processes end.
        self.gathering: list[Callable[[float], None]] = []

    def new_number(self) -> int:
        """A number for a call."""
        return next(self._numbers)

    def _check_order(self, future: CallFuture[Any]) -> None:
        """In debug mode, after a call that went well."""

    def over(self, future: CallFuture[Any], error: BaseException | None) -> None:
        """Tell a trace and the meters that somebody has seen the end of a call."""
        if future.draft is not None:
            future.draft.end(error)
        if meters.on and not future.metered and not self.transport.immediate:
            future.metered = True
            name = f"{future.role}.{future.method}" if future.role else future.method
            meters.ended(self.name, name, self.now() - future.started, error is not None)

    def watch(self, future: CallFuture[Any]) -> Watch:
        """The watch over a call."""
        return Watch(
            self.transport,
            self.name,
            future.method,
            future.role,
            future.plan.ranks,
            [self.endpoints[rank] for rank in future.plan.ranks],
            [ticket.value for ticket in future.tickets],
            self._settings.grace_s,
            call=future.number,
            owner=self.owner,
            started=future.started,
            meter=self.book.arrived,
            rests=[ticket.rest for ticket in future.tickets if ticket.rest is not None],
        )

    def settle(self, future: CallFuture[Any], limit: float | None) -> Any:
        """Wait for a call and give its value, or raise its one error."""
        if future.draft is not None and future.draft.asked is None:
            future.draft.asked = time.time_ns()
        self.check_epoch(future)
        if future.cancel_error is not None:
            raise future.cancel_error
        until = earliest(limit, future.deadline)
        while True:
            try:
                value = settled_value(future, self.transport, until, self.book.arrived)
                if self._settings.debug:
                    self._check_order(future)
                return value
            except NotReady:
                error = self._late(future, self._watch_of_now(future), limit)
                until = None  # without an error it has ended by now
            except FetchFailed:
                error = self.failed(self._watch_of_now(future), future)
            if error is not None:
                raise error from None

    def _watch_of_now(self, future: CallFuture[Any]) -> Watch:
        """The watch over a call of the present epoch; a restart that comes after this leaves it the old endpoints.

        Raises:
            StaleEpoch: the group was restarted since the call was sent.
        """
        watch = self.watch(future)
        self.check_epoch(future)
        return watch

    def check_epoch(self, future: CallFuture[Any]) -> None:
        """See to it that a call is one of the present epoch.

        Raises:
            StaleEpoch: the group was restarted since.
        """
        if future.epoch != self.epoch:
            raise StaleEpoch(
                f"group {self.name!r} was restarted: this call of {future.method} belongs to epoch {future.epoch}, the "
                f"group is in epoch {self.epoch}; make the call again",
                group=self.name,
                epoch=future.epoch,
                current=self.epoch,
            )

    def _late(self, future: CallFuture[Any], watch: Watch, limit: float | None) -> CallTimeout | None:
        if future.deadline is None or (limit is not None and limit < future.deadline):
            waited = (self.now() if limit is None else limit) - watch.started
            late = watch.timeout(round(max(0.0, waited), 3))
            return late[0] if late else None
        late = watch.timeout(future.timeout)
        if late is None:
            return None
        future.expired = True
        self._stop(late[1], watch)
        self.broken(late[0], future.epoch)
        return late[0]

    def failed(self, watch: Watch, future: CallFuture[Any]) -> PhalanxError:
        """The one error of a call of which a rank failed; breaks the group where a rank is lost or still busy."""
        self.check_epoch(future)
        if future.cancelling is not None:
            future.cancelling.wait(_CANCELLED_WITHIN_S)
        if future.cancel_error is not None:
            return future.cancel_error
        if self.closed:
            return GroupClosed(f"group {self.name!r} was closed before {watch.method} ended", group=self.name)
        if not self._stopped.isdisjoint(future.plan.ranks):
            return self.lifecycle.broken_error()  # it went down with another call, which has the cause
        error, pending, died = watch.error()
        self.check_epoch(future)
        if self.closed:
            return GroupClosed(f"group {self.name!r} was closed before {watch.method} ended", group=self.name)
        self.book.failed()
        self._stop(pending, watch)
        if isinstance(error, GroupClosed):
            self.begin_close()
            self.finish_close()
        elif pending or died:
            self.broken(error, future.epoch)
        return error

    def cancel(self, future: CallFuture[Any]) -> bool:
        """End a call: what has not begun is dropped, what runs is interrupted, what does not yield is stopped.

        Returns whether the call was cancelled; False if every rank returned first. The group stays ready where
        every rank ended its part by itself within the grace, and is broken otherwise.
        """
        self.check_epoch(future)
        watch = self.watch(future)
        pending = self.transport.wait(watch.refs, len(watch.refs), 0)[1]
        if not pending:
            return False
        drops = self.transport.cancel([watch.endpoints[p] for p in pending], future.number)
        dropped = [p for p, drop in zip(pending, drops, strict=True) if drop]
        running = [p for p in pending if p not in dropped]
        pending = self._still_at_it(watch, running, self._settings.grace_s)
        severed = bool(pending)
        if severed:  # perhaps in a collective, which nothing else ends
            self.transport.sever([watch.endpoints[p] for p in pending])
            pending = self._still_at_it(watch, running, _SEVERED_WITHIN_S)
        error = watch.cancelled(dropped, pending)
        self._stop(pending, watch)
        if error is None:
            return False
        if severed or any(report.kind == "died" for report in error.failures):
            self.broken(error, future.epoch)
        future.cancel_error = error
        return True

    def _still_at_it(self, watch: Watch, positions: Sequence[int], seconds: float) -> list[int]:
        """Of some positions those that have not ended after a while."""
        if not positions:
            return []
        refs = [watch.refs[position] for position in positions]
        return [positions[index] for index in self.transport.wait(refs, len(refs), seconds)[1]]

    def _stop(self, positions: Sequence[int], watch: Watch) -> None:
        """Stop ranks that do not end by themselves. Whoever calls breaks the group, so no call follows."""
        if positions:
            self._stopped.update(watch.ranks[position] for position in positions)
            self.transport.kill([watch.endpoints[position] for position in positions])

    def has_dead(self) -> bool:
        """Whether a rank of a group that is ready is known to be gone; cheap."""
        if self.lifecycle.state is not State.READY or not self.owner:
            return False
        return not all(map(self.transport.alive, self.endpoints))

    def touches_dead(self, future: CallFuture[Any]) -> bool:
        """Whether a call failed on a rank because that is gone; one that had returned before did not."""
        if future.epoch != self.epoch:
            return False
        for rank, ticket in zip(future.plan.ranks, future.tickets, strict=True):
            if not self.transport.alive(self.endpoints[rank]):
                ended = self.transport.wait([ticket.value], 1, 0)[0]
                if not ended or not self.transport.outcome(ticket.value).ok:
                    return True
        return False

    def lost(self) -> None:
        """Look whether a rank died while nobody called it, and break the group if so."""
        if not self.has_dead():
            return
        epoch = self.epoch
        dead = [rank for rank, endpoint in enumerate(self.endpoints) if not self.transport.alive(endpoint)]
        if not dead:
            return
        watch = Watch(
            self.transport, self.name, "(between calls)", "", range(self.world_size), self.endpoints, (), 0.0
        )
        at = self.now()
        reports = [
            replace(watch.dead(rank, self.transport.post_mortem(self.endpoints[rank], None)), at=at)
            for rank in dead
        ]
        error = combine(self.name, watch.method, reports)
        if isinstance(error, WorkerDiedError) and not self.closed:
            self.broken(error, epoch)

    def watch_setup(self, tickets: Sequence[Ticket]) -> Watch:
        """The watch over the constructors."""
        refs = [ticket.value for ticket in tickets]
        ranks = range(len(refs))
        return Watch(
            self.transport,
            self.name,
            "__init__",
            "",
            ranks,
            self.endpoints,
            refs,
            self._settings.grace_s,
            call=SETUP_CALL,
        )

    def settle_setup(self, watch: Watch, timeout: float) -> None:
        """Wait until every constructor has returned.

        Raises:
            WorkerInitError, WorkerDiedError, CallTimeout: one did not; the processes are for the caller to end.
        """
        limit: float | None = watch.started + timeout
        while True:
            try:
                watch.values(limit, Policy.PRIVATE)
                return
            except NotReady:
                late = watch.timeout(timeout, init=True)
                limit = None  # all have returned by now, or there is an error
                if late is not None:
                    raise late[0] from None
            except FetchFailed:
                raise watch.error(init=True)[0] from None

    def replay(self, timeout: float) -> None:
        """Make the calls that are marked for it again, on the ranks of this epoch, one after another.

        Raises:
            RemoteCallError, WorkerDiedError, CallTimeout: one of them failed.
        """
        for entry in self.replays.to_make():
            number = next(self._numbers)
            trace = "" if tracing.recorder is None else tracing.recorder.id
            tickets = [
                self.transport.submit(
                    self.endpoints[rank], entry.role, entry.method, message.data, message.refs
                )
                for rank, message in entry.messages(number, self.epoch, trace)
            ]
            watch = Watch(
                self.transport,
                self.name,
                entry.method,
                entry.role,
                entry.ranks,
                [self.endpoints[rank] for rank in entry.ranks],
                [ticket.value for ticket in tickets],
                self._settings.grace_s,
                call=number,
            )
            try:
                watch.values(watch.started + timeout, Policy.VIEW)
            except NotReady:
                late = watch.timeout(timeout)
                if late is not None:
                    raise late[0] from None
            except FetchFailed:
                raise watch.error()[0] from None

    def not_yet(self, future: CallFuture[Any], timeout: float | None) -> CallTimeout:
        """The error for a wait that was over before another thread's wait for the same call."""
        late = self.watch(future).timeout(timeout)
        if late is not None:
            return late[0]
        text = (
            f"group {self.name!r}, {future.method}: another thread is fetching the result just now; ask again"
        )
        return CallTimeout(text, group=self.name, method=future.method, timeout=timeout)

    def all_ended(self, future: CallFuture[Any]) -> bool:
        """Whether no rank is still at it."""
        refs = [ticket.value for ticket in future.tickets]
        return not self.transport.wait(refs, len(refs), 0)[1]

    def stream(self, future: CallFuture[Any], timeout: float | None) -> Iterator[tuple[int, Any]]:
        """(rank, output) of each rank as it finishes."""
        self.check_epoch(future)
        if future.draft is not None and future.draft.asked is None:
            future.draft.asked = time.time_ns()
        limit = None if timeout is None else self.now() + timeout
        watch = self.watch(future)
        given: set[int] = set()
        until = earliest(limit, future.deadline)
        while True:
            try:
                for rank, output in watch.stream(until):
                    if rank not in given:
                        given.add(rank)
                        if future.draft is not None:
                            future.draft.arrived(rank)
                        yield rank, output
                self.over(future, None)
                return
            except NotReady:
                error, until = self._late(future, watch, limit), None
            except FetchFailed:
                error = self.failed(watch, future)
            if error is not None:
                if future.expired or not isinstance(error, CallTimeout):
                    self.over(future, error)
                raise error from None
