"""The processes of a group: started, ended, and started anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace

from phalanx.backends.backend_types import NotReady, Reservation
from phalanx.calls.call import Call
from phalanx.calls.call_status import raisable
from phalanx.calls.run_on import gather_before_end, run_on
from phalanx.declare.bind import BoundClass
from phalanx.errors import GroupBroken, GroupClosed, PhalanxError
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.membership_refresh import publish
from phalanx.group.options import GroupOptions
from phalanx.group.preemption_monitor import watchman
from phalanx.members.constructor_calls import constructors, given_up, joined, make_again, sent_to
from phalanx.members.launch import Launched, Present, launch
from phalanx.members.membership_rollback import settle
from phalanx.members.start_progress import Starting
from phalanx.members.weight_resync import bring_to_replaced
from phalanx.pools.pool import ResourcePool
from phalanx.session.monitor import monitor
from phalanx.session.output import display
from phalanx.wire.call_page import CLOSE_CALL
from phalanx.wire.messages import Message, RankConfig
from phalanx.worker import handlers as questions

_CLOSE_PATIENCE_S = 5.0
_HANDS_OVER_S = 65.0  # of a rank that leaves a group: others go on with what it has
_BUSY_PATIENCE_S = 1.0


class GroupProcesses:
    """What a group's ranks are made of, where they run, and the steps by which they come and go.

    ``after_start`` is called when the ranks of an epoch are there.
    """

    def __init__(
        self,
        core: Group,
        pool: ResourcePool,
        roles: Mapping[str, BoundClass],
        options: GroupOptions,
        after_start: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._pool = pool
        self._roles = roles
        self._options = options
        self._after_start = after_start
        self._extras: list[Reservation] = []

    def start(self) -> None:
        """Start the processes of the epoch that the group has begun, and bring them where those before them were."""
        core, options = self._core, self._options
        call = constructors(core, options.start_timeout)
        try:
            with Starting(core.transport, core.name, core.world_size) as shown:
                self._launch(call, shown)
                core.life.constructed = call.result(None)
                make_again(core, options.start_timeout, call.trace)
        except BaseException as error:
            given_up(call, error)
            raise
        self._ready()
        if not core.transport.immediate:
            monitor.add(core)
            watchman.add(core.life)

    def _ready(self) -> None:
        """Take calls on the ranks that are there, and leave word of them for views in other processes."""
        core = self._core
        core.life.started()
        publish(core.life, core.roster_key)
        if self._after_start is not None:
            self._after_start()

    def _launch(self, call: Call, shown: Starting) -> None:
        core = self._core
        launched = self._launched(call, self._pool.first(core.world_size), call.epoch.number)
        self._note_extras(launched.extras)
        epoch = core.life.enter(launched.endpoints)
        if not self._options.detached:  # those are to outlive this process
            core.transport.attend(launched.endpoints)
        sent_to(call, epoch, launched.tickets, [Message(b"", ())] * epoch.size)
        shown.watch(launched.endpoints, [ticket.value for ticket in launched.tickets])

    def _launched(
        self, call: Call, ground: ResourcePool, epoch: int, present: Present | None = None
    ) -> Launched:
        """Start the ranks of ``ground`` that have no processes, for that epoch."""
        core = self._core
        return launch(
            ground,
            self._roles,
            core.name,
            epoch,
            self._options,
            core.outlet,
            trace=call.trace,
            amend=self._with_versions,
            present=present,
        )

    @contextlib.contextmanager
    def joining(self, ground: ResourcePool, ranks: range) -> Generator[None]:
        """Start ranks behind those that there are; the time in which they are there and get no calls yet.

        They are ended, and the group is as it was, where that time ends with an error.
        """
        core, options, old = self._core, self._options, self._core.epoch
        call = constructors(core, options.start_timeout, ranks)
        launched: Launched | None = None
        try:
            present = Present(dict(enumerate(old.endpoints)))
            launched = self._launched(call, ground, old.number + 1, present)
            epoch = core.life.change([*old.endpoints, *launched.endpoints], old.size, joining=True)
            if not options.detached:
                core.transport.attend(launched.endpoints)
            sent_to(call, epoch, launched.tickets, [Message(b"", ())] * len(ranks))
            call.result(None)
            make_again(core, options.start_timeout, call.trace, ranks)
            yield
        except BaseException as error:
            given_up(call, error)
            if launched is not None:
                self._send_away(launched, old)
            raise
        self._note_extras(launched.extras)

    def _send_away(self, launched: Launched, old: Epoch) -> None:
        core = self._core
        core.transport.kill(launched.endpoints)
        display.finish(launched.endpoints)
        if launched.extras is not None:
            core.transport.release(launched.extras)
        with contextlib.suppress(GroupClosed, GroupBroken):
            core.life.change(old.endpoints, old.size)

    def dismiss(self, epoch: Epoch, ranks: range) -> None:
        """End the processes of ranks that have finished; they close first."""
        core = self._core
        with contextlib.suppress(PhalanxError, NotReady):
            self._close_workers(epoch, _HANDS_OVER_S, ranks)
        leaving = epoch.endpoints[ranks.start : ranks.stop]
        core.transport.kill(leaving)
        display.finish(leaving)

    def _with_versions(self, setup: RankConfig) -> RankConfig:
        """What the ranks before this one knew of weights."""
        life = self._core.life
        if not life.had_weights and not life.published_weights:
            return setup
        had, published = dict(life.had_weights), dict(life.published_weights)
        return replace(setup, had_weights=had, published_weights=published)

    def end(self, epoch: Epoch, patience: float) -> None:
        """End the processes of an epoch, with all that they started; they have ``patience`` seconds to close first."""
        core = self._core
        if patience and epoch.endpoints:
            with contextlib.suppress(PhalanxError, NotReady):
                self._close_workers(epoch, patience)
        if core.life.before_end:
            gather_before_end(core, self.patience())
        core.transport.kill(epoch.endpoints)
        display.finish(epoch.endpoints)
        while self._extras:
            core.transport.release(self._extras.pop())

    def _note_extras(self, extras: Reservation | None) -> None:
        if extras is not None:
            self._extras.append(extras)

    def patience(self) -> float:
        """Seconds for the workers' own ``close()``: a rank that is at a call cannot begin it, perhaps for ever."""
        return _BUSY_PATIENCE_S if self._core.under_way.busy() else _CLOSE_PATIENCE_S

    def _close_workers(self, epoch: Epoch, patience: float, among: Sequence[int] | None = None) -> None:
        """Ask ranks, or all, to close their instances; one that is busy or gone is not waited for beyond patience."""
        alive = self._core.transport.alive
        among = range(len(epoch.endpoints)) if among is None else among
        ranks = [rank for rank in among if alive(epoch.endpoints[rank])]
        if ranks:
            call = run_on(
                self._core,
                questions.close,
                ranks=ranks,
                title="close",
                checked=False,
                epoch=epoch,
                number=CLOSE_CALL,
            )
            call.arrivals.wait(range(len(ranks)), len(ranks), patience)

    def restart(self, size: int | None = None) -> None:
        """End what is left of the group and start it anew, on the first ``size`` slots; see ``WorkerGroup.restart``."""
        core = self._core
        with core.restarting:
            was_ready = core.lifecycle.state is State.READY
            left = core.life.begin_restart(size)
            begun = core.life.epoch.number
            core.life.snapshot = None  # it ends with the processes that hold it
            try:
                self.end(left, self.patience() if was_ready else 0.0)
                self._pool.repair(self._options.start_timeout)
                self.start()
            except BaseException as error:
                try:
                    self._abandon()
                finally:  # also where whoever waits is impatient, and ends that too
                    if core.life.epoch.number == begun:
                        core.life.broken(_as_cause(core.name, "be restarted", error), core.life.epoch)
                raise
            if core.closed:
                self._abandon()
                raise GroupClosed(f"group {core.name!r} was closed while it was restarted", group=core.name)

    def replace(self, gone: Collection[int], bring_back: Callable[[], None]) -> None:
        """Start new processes for some ranks, at whose constructors the others rejoin; see ``px.replace_ranks``.

        ``bring_back`` gives all of them their states, once they are there. Then they get weights, and then calls.
        """
        core = self._core
        left = core.life.begin_restart(gone=gone)
        begun = core.life.epoch.number
        try:
            self._rejoined(left, gone)
            bring_back()
            bring_to_replaced(core, gone)
        except BaseException as error:
            try:
                self._left_as_they_are(left, begun)
            finally:  # also where whoever waits is impatient, and ends that too
                if core.life.epoch.number == begun:
                    core.life.broken(_as_cause(core.name, "be given new ranks", error), core.life.epoch)
            raise
        self._ready()
        if core.closed:
            self._abandon()
            raise GroupClosed(
                f"group {core.name!r} was closed while ranks of it were replaced", group=core.name
            )

    def _left_as_they_are(self, left: Epoch, begun: int) -> None:
        """End the ranks that were started where a replacement failed; have the others ready for another try."""
        core = self._core
        here = core.life.epoch.number == begun
        started = [one for one in core.endpoints if one not in left.endpoints]
        if here and not core.endpoints:  # those that stay are members again: for another try, or to be ended
            core.life.enter(left.endpoints)
        core.transport.kill(started)
        if here:
            settle(core, left.endpoints)
        if core.closed:  # close() found no members to end
            self.end(core.epoch, 0.0)

    def _rejoined(self, left: Epoch, gone: Collection[int]) -> None:
        core, options = self._core, self._options
        lost = [left.endpoints[rank] for rank in gone] + list(left.endpoints[left.size :])
        core.transport.kill(lost)
        display.finish(lost)
        self._pool.repair(options.start_timeout)
        staying = {
            rank: endpoint for rank, endpoint in enumerate(left.endpoints[: left.size]) if rank not in gone
        }
        slots = [endpoint.slot for endpoint in left.endpoints[: left.size]]
        call = constructors(core, options.start_timeout)
        try:
            ground = self._pool.first(left.size)
            launched = self._launched(call, ground, call.epoch.number, Present(staying, slots))
            new = dict(zip(sorted(gone), launched.endpoints, strict=True))
            epoch = core.life.enter([{**staying, **new}[rank] for rank in range(left.size)])
            if not options.detached:
                core.transport.attend(launched.endpoints)
            tickets = joined(core, call, launched, staying, epoch.number)
            sent_to(call, epoch, tickets, [Message(b"", ())] * epoch.size)
            call.result(None)
            make_again(core, options.start_timeout, call.trace)
        except BaseException as error:
            given_up(call, error)
            raise

    def _abandon(self) -> None:
        """End the processes that were started; all that they hold too, where ``close()`` was over before they came."""
        core = self._core
        if core.closed:
            self.end(core.epoch, 0.0)
        else:
            core.transport.kill(core.endpoints)


def _as_cause(group: str, what: str, error: BaseException) -> PhalanxError:
    if isinstance(kept := raisable(error), PhalanxError):  # a copy: the group keeps no frames of its caller
        return kept
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return GroupBroken(f"group {group!r} could not {what}: {why}", group=group)
