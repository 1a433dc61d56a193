"""The processes of a group: start, restart and end.

Every change leaves an epoch, starts processes, enters the next epoch with them, and waits for their constructors, in
the context ``constructors``, the call of the constructors; ``new_ranks`` breaks the group if a start fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

from phalanx.backends.backend_types import Endpoint, NotReady, ResultHandle
from phalanx.calls import health_check
from phalanx.calls.call import Call
from phalanx.calls.call_state import Results, listening, raisable
from phalanx.calls.in_flight import is_busy
from phalanx.calls.run_on import run_on, submit_unchecked
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.errors import GroupBroken, GroupClosed, PhalanxError
from phalanx.group import preemption_notices
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.roster import publish, withdraw
from phalanx.members.launch import launch
from phalanx.session.session import session
from phalanx.wire.call_page import SETUP_CALL
from phalanx.worker import handlers

_CLOSE_PATIENCE_S = 5.0
_BUSY_PATIENCE_S = 1.0


def start(core: Group) -> None:
    """Start the processes of the epoch that the group has begun, and repeat the calls marked ``rerun_on_restart``."""
    with constructors(core) as call:
        launched = launch(core, core.pool.first(core.world_size), call.epoch.number, trace=call.trace)
        construct(call, core.enter(launched.endpoints), launched.results)
    core.started()
    publish(core)
    if not core.backend.immediate:
        health_check.checks.begin()
        preemption_notices.looks.begin()


@contextlib.contextmanager
def constructors(core: Group, ranks: range | None = None) -> Generator[Call]:
    """Return a context around the call of the constructors of the new epoch, or of some of its ranks.

    If it ends with an error, the remaining results are not read. The caller ends the processes.
    """
    ranks = range(core.world_size) if ranks is None else ranks
    plan = CallPlan(ranks, (), {}, GatherPlan("list", range(len(ranks))))
    call = Call(
        core,
        core.epoch,
        plan,
        "",
        "__init__",
        SETUP_CALL,
        listening.current,
        acts=False,
        limit=core.options.start_timeout,
    )
    call.listener.planned(call)
    try:
        yield call
    except BaseException as error:
        if call.was_sent:
            call.arrivals.disregard()
        call.tell_end(error)
        raise


def construct(
    call: Call, epoch: Epoch, results: Sequence[ResultHandle], joining: range | None = None
) -> None:
    """Wait for the constructors of processes that were sent their rank configs, and repeat calls there.

    Raises:
        WorkerInitError, RemoteCallError, WorkerDiedError, CallTimeout: if a constructor or a call failed.
    """
    call.epoch = epoch
    call.arrivals = Results(call.core.backend, results)
    call.note_sent(0)
    call.result(None)
    _make_again(call.core, call.trace, joining)


def _make_again(core: Group, trace: str, joining: range | None) -> None:
    """Repeat the calls of the rerun log on the ranks of this epoch, in order.

    On ``joining`` ranks, only calls that went to all ranks with equal arguments are repeated.

    Raises:
        RemoteCallError, WorkerDiedError, CallTimeout: if a call failed.
    """
    epoch, limit = core.epoch, core.options.start_timeout
    for made in core.reruns.to_make(epoch.size):
        entry = made if joining is None else made.extended(joining)
        if entry is None:
            continue
        number = core.new_number()
        again = entry.messages(number, epoch.number, trace)
        plan = CallPlan(entry.ranks, (), {}, GatherPlan("list", range(len(entry.ranks))))
        call = submit_unchecked(core, epoch, plan, entry.role, entry.method, again, number, limit=limit)
        call.result(None)


def restart(core: Group) -> None:
    """End the remaining processes and start the group again; see ``WorkerGroup.restart``."""
    with core.changing:
        was_ready = core.lifecycle.state is State.READY
        left = core.begin_restart()
        core.snapshot = None  # it is lost with the processes that hold it
        with new_ranks(core, "be restarted", lambda: core.backend.kill(core.endpoints)):
            end(core, left, _patience(core) if was_ready else 0.0)
            core.pool.first(core.world_size).repair(core.options.start_timeout)
            start(core)


@contextlib.contextmanager
def new_ranks(core: Group, change: str, undo: Callable[[], object]) -> Generator[None]:
    """Return a context in which the new epoch gets its ranks. After an error, call ``undo()`` and break the group.

    Raises:
        GroupClosed: if the group was closed in the meantime; its new processes were ended.
    """
    try:
        yield
    except BaseException as error:
        try:
            undo()
            if core.closed:  # close() may have found no members to end
                end(core, core.epoch, 0.0)
        finally:  # also after a second interrupt
            core.broken(_as_cause(core.name, change, error), core.epoch)
        if core.closed and isinstance(error, Exception):
            raise closed_while(core.name, change) from error
        raise
    if core.closed:
        end(core, core.epoch, 0.0)
        raise closed_while(core.name, change)


def closed_while(group: str, change: str) -> GroupClosed:
    """Return the error of a change that failed because another thread closed the group."""
    return GroupClosed(f"group {group!r} was closed while it was to {change}", group=group)


def _as_cause(group: str, change: str, error: BaseException) -> PhalanxError:
    if isinstance(kept := raisable(error), PhalanxError):  # a copy: the group keeps no frames of its caller
        return kept
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return GroupBroken(f"group {group!r} could not {change}: {why}", group=group)


def close(core: Group, patience: float | None = None) -> None:
    """End a group whose closing has begun: withdraw its roster, end its processes, release its slots.

    Args:
        core: the group.
        patience: seconds for the workers' own ``close()``; None: 5 s, or 1 s if a worker is in a call.
    """
    try:
        try:
            withdraw(core)
        finally:
            end(core, core.epoch, _patience(core) if patience is None else patience)
    finally:  # also after an interrupt
        if core.has_pool:
            core.pool.unclaim(core.tenant)
        core.finish_close()


def end(core: Group, epoch: Epoch, patience: float) -> None:
    """End the processes of an epoch and release their extra resources; workers first get ``patience`` s to close."""
    try:
        if patience:
            close_workers(core, epoch, range(len(epoch.endpoints)), patience)
        for gather in list(core.before_end):
            with contextlib.suppress(PhalanxError, NotReady, OSError):
                gather(_patience(core))
        core.before_end.clear()
    finally:  # also after an interrupt: no other code would end these processes
        stop(core, epoch.endpoints or [endpoint for endpoint in epoch.stay if endpoint is not None])
        extras, core.extras = core.extras, {}
        core.backend.release(list(extras.values()))


def close_workers(core: Group, epoch: Epoch, ranks: range, patience: float) -> None:
    """Run the workers' ``close()`` on the ranks that are alive; wait ``patience`` seconds at most."""
    with contextlib.suppress(PhalanxError, NotReady):
        dead = core.backend.dead_of(epoch.endpoints)
        living = [rank for rank in ranks if rank not in dead]
        if living:
            call = run_on(core, handlers.close, ranks=living, title="close", checked=False, epoch=epoch)
            call.arrivals.pending(patience)


def stop(core: Group, endpoints: Sequence[Endpoint]) -> None:
    """Show the rest of the processes' output, and kill them."""
    session.display.finish(endpoints)  # later, to read it would start the agents of other nodes again
    core.backend.kill(endpoints)


def _patience(core: Group) -> float:
    """Return the seconds for the workers' own ``close()``: few if a rank is busy, since its call may never end."""
    return _BUSY_PATIENCE_S if is_busy(core) else _CLOSE_PATIENCE_S
