"""The processes of a group: start, end, restart, replacement of some, and ranks that join.

Every change leaves an epoch, starts and constructs processes, and enters the next epoch. ``close`` ends a group,
``end`` the processes of an epoch, ``dismiss`` ranks that have left, ``settle`` the calls of ranks that stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence

from phalanx.backends.backend_types import Endpoint, NotReady, Reservation
from phalanx.calls import health_check
from phalanx.calls.call import Call
from phalanx.calls.call_state import raisable
from phalanx.calls.in_flight import is_busy
from phalanx.calls.run_on import gather_before_end, run_on
from phalanx.errors import GroupBroken, GroupClosed, PhalanxError
from phalanx.group import preemption_notices
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.roster import publish, withdraw
from phalanx.members.detached import publish_record, withdraw_record
from phalanx.members.launch import (
    Launched,
    constructors,
    launch,
    make_again,
    rejoin_calls,
    sent_to,
)
from phalanx.members.start_progress import Starting
from phalanx.members.weight_resync import bring_to_replaced
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.worker import handlers

_CLOSE_PATIENCE_S = 5.0
_LEAVE_PATIENCE_S = 65.0  # a rank that leaves hands its items over, for which its channels take 60 s at most
_BUSY_PATIENCE_S = 1.0


def start(core: Group) -> None:
    """Start the processes of the epoch that the group has begun, and repeat the calls marked ``rerun_on_restart``."""
    with Starting(core.backend, core.name, core.world_size) as shown, constructors(core) as call:
        launched = launch(core, core.pool.first(core.world_size), call.epoch.number, trace=call.trace)
        _note_extras(core, launched.extras)
        sent_to(call, core.enter(launched.endpoints), launched.tickets)
        shown.watch(launched.endpoints, [ticket.value for ticket in launched.tickets])
        core.constructed = call.result(None)
        make_again(core, call.trace)
    _open_for_calls(core)
    if not core.backend.immediate:
        health_check.watch()
        preemption_notices.watch()


def _open_for_calls(core: Group) -> None:
    """Take calls on the ranks that are there, and leave word of them for other processes."""
    core.started()
    publish(core)
    if core.options.detached:
        publish_record(core)


def _note_extras(core: Group, extras: Reservation | None) -> None:
    if extras is not None:
        core.extras.append(extras)


@contextlib.contextmanager
def joining(core: Group, ground: ResourcePool, ranks: range) -> Generator[None]:
    """Start ranks behind the existing ranks, for a context in which they get no calls yet.

    If the context ends with an error, they are ended, and the group is as it was.
    """
    old = core.epoch
    launched: Launched | None = None
    try:
        with constructors(core, ranks) as call:
            kept = dict(enumerate(old.endpoints))
            launched = launch(core, ground, old.number + 1, trace=call.trace, kept=kept)
            epoch = core.change([*old.endpoints, *launched.endpoints], old.size, joining=True)
            sent_to(call, epoch, launched.tickets)
            call.result(None)
            make_again(core, call.trace, ranks)
            yield
    except BaseException:
        if launched is not None:
            _stop(core, launched.endpoints)
            if launched.extras is not None:
                core.backend.release(launched.extras.keys)
            with contextlib.suppress(GroupClosed, GroupBroken):
                core.change(old.endpoints, old.size)
        raise
    _note_extras(core, launched.extras)


def _stop(core: Group, endpoints: Sequence[Endpoint]) -> None:
    core.backend.kill(endpoints)
    session.display.finish(endpoints)


def dismiss(core: Group, epoch: Epoch, ranks: range) -> None:
    """End the processes of ranks that have finished; they close first."""
    with contextlib.suppress(PhalanxError, NotReady):
        _close_workers(core, epoch, _LEAVE_PATIENCE_S, ranks)
    _stop(core, epoch.endpoints[ranks.start : ranks.stop])


def close(core: Group, patience: float | None = None) -> None:
    """End a group whose closing has begun: withdraw its roster, end its processes, give back its slots.

    Args:
        core: the group.
        patience: seconds for the workers' own ``close()``; None: 5 s, or 1 s if a worker is in a call.
    """
    withdraw(core)
    if core.options.detached:
        withdraw_record(core)
    end(core, core.epoch, _patience(core) if patience is None else patience)
    core.pool.unclaim(core.tenant)
    core.finish_close()


def end(core: Group, epoch: Epoch, patience: float) -> None:
    """End the processes of an epoch, with all that they started; they have ``patience`` seconds to close first."""
    if patience and epoch.endpoints:
        with contextlib.suppress(PhalanxError, NotReady):
            _close_workers(core, epoch, patience)
    if core.before_end:
        gather_before_end(core, _patience(core))
    _stop(core, epoch.endpoints)
    while core.extras:
        core.backend.release(core.extras.pop().keys)


def _patience(core: Group) -> float:
    """Seconds for the workers' own ``close()``: a rank that is at a call cannot begin it, perhaps for ever."""
    return _BUSY_PATIENCE_S if is_busy(core) else _CLOSE_PATIENCE_S


def _close_workers(core: Group, epoch: Epoch, patience: float, among: Sequence[int] | None = None) -> None:
    """Ask living ranks, of ``among`` or all, to close their instances; wait ``patience`` seconds at most."""
    among = range(len(epoch.endpoints)) if among is None else among
    dead = core.backend.dead_of(epoch.endpoints)
    ranks = [rank for rank in among if rank not in dead]
    if ranks:
        call = run_on(core, handlers.close, ranks=ranks, title="close", checked=False, epoch=epoch)
        call.arrivals.pending(patience)


def restart(core: Group, size: int | None = None) -> None:
    """End the remaining processes and start the group again, on the first ``size`` slots; see ``restart()``."""
    with core.changing:
        was_ready = core.lifecycle.state is State.READY
        left = core.begin_restart(size)
        core.snapshot = None  # it ends with the processes that hold it
        with _new_ranks(core, "be restarted", lambda: _abandon(core)):
            end(core, left, _patience(core) if was_ready else 0.0)
            core.pool.repair(core.options.start_timeout)
            start(core)


def replace_processes(core: Group, gone: Collection[int], bring_back: Callable[[], None]) -> None:
    """Start new processes for some ranks, at whose constructors the others rejoin; see ``px.replace_ranks``.

    ``bring_back`` restores all states, once the ranks are there. Then they get weights, and then calls.
    """
    left = core.begin_restart(gone=gone)
    number = core.epoch.number
    with _new_ranks(core, "be given new ranks", lambda: _undo_replacement(core, left, number)):
        _start_replacements(core, left, gone)
        bring_back()
        bring_to_replaced(core, gone)
        _open_for_calls(core)


@contextlib.contextmanager
def _new_ranks(core: Group, change: str, undo: Callable[[], None]) -> Generator[None]:
    """Return a context in which the epoch begun gets ranks. After an error, ``undo()`` and break the group.

    Raises:
        GroupClosed: the group was closed meanwhile; nothing of it is left.
    """
    number = core.epoch.number
    try:
        yield
    except BaseException as error:
        try:
            undo()
        finally:  # also after a second interrupt
            if core.epoch.number == number:
                core.broken(_as_cause(core.name, change, error), core.epoch)
        raise
    if core.closed:
        _abandon(core)
        raise GroupClosed(f"group {core.name!r} was closed while it was to {change}", group=core.name)


def _undo_replacement(core: Group, left: Epoch, number: int) -> None:
    """End the ranks that were started where a replacement failed; have the others ready for another try."""
    here = core.epoch.number == number
    started = [one for one in core.endpoints if one not in left.endpoints]
    if here and not core.endpoints:  # ranks that stay are members again, for another try or to be ended
        core.enter(left.endpoints)
    core.backend.kill(started)
    if here:
        settle(core, left.endpoints)
    if core.closed:  # close() found no members to end
        end(core, core.epoch, 0.0)


def _start_replacements(core: Group, left: Epoch, gone: Collection[int]) -> None:
    members = left.endpoints[: left.size]
    _stop(core, [left.endpoints[rank] for rank in gone] + list(left.endpoints[left.size :]))
    core.pool.repair(core.options.start_timeout)
    staying = {rank: one for rank, one in enumerate(members) if rank not in gone}
    with constructors(core) as call:
        ground, places = core.pool.first(left.size), [one.slot for one in members]
        launched = launch(core, ground, call.epoch.number, trace=call.trace, kept=staying, places=places)
        new = dict(zip(sorted(gone), launched.endpoints, strict=True))
        epoch = core.enter([{**staying, **new}[rank] for rank in range(left.size)])
        sent_to(call, epoch, rejoin_calls(core, launched, staying, epoch.number))
        call.result(None)
        make_again(core, call.trace)


def _abandon(core: Group) -> None:
    """End the processes that were started; all that they hold too, where ``close()`` was over before they came."""
    if core.closed:
        end(core, core.epoch, 0.0)
    else:
        core.backend.kill(core.endpoints)


def _as_cause(group: str, change: str, error: BaseException) -> PhalanxError:
    if isinstance(kept := raisable(error), PhalanxError):  # a copy: the group keeps no frames of its caller
        return kept
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return GroupBroken(f"group {group!r} could not {change}: {why}", group=group)


_ANSWER_S = 1.0
_INTERRUPTED_S = 1.0


def settle(core: Group, staying: Sequence[Endpoint]) -> None:
    """Make the ``staying`` ranks of the present epoch ready for the next change.

    Their calls are interrupted, and their collectives are aborted, since a rank that waits in a collective for a rank
    that never joins would wait for ever. Ranks that do not react are stopped, and count as lost.
    """
    backend, endpoints = core.backend, core.endpoints
    if core.closed or backend.immediate or not backend.connected():
        return  # close() ends them all
    dead = backend.dead_of(endpoints)
    ranks = [rank for rank, one in enumerate(endpoints) if one in staying and rank not in dead]
    if not ranks:
        return
    asked = run_on(core, handlers.meet, ranks=ranks, title="settle", checked=False)
    late = _late(asked, ranks, _ANSWER_S)
    for rank, sight in zip(late, backend.sights([endpoints[rank] for rank in late], False), strict=True):
        for call in sight.running:
            backend.cancel([endpoints[rank]], [call])
    late = _late(asked, ranks, _INTERRUPTED_S) if late else []
    if late:
        backend.sever([endpoints[rank] for rank in late])
        late = _late(asked, ranks, _INTERRUPTED_S)
    backend.kill([endpoints[rank] for rank in late])


def _late(asked: Call, ranks: Sequence[int], seconds: float) -> list[int]:
    """Return the ranks that have not responded after ``seconds``."""
    return [ranks[position] for position in asked.arrivals.pending(seconds)]
