"""The states of ranks copied into the memory of other ranks, and brought back from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same
from phalanx.errors import CallTimeout, GroupBroken
from phalanx.execution.saving import questions
from phalanx.execution.saving.orders import Restore, Take, Taken
from phalanx.runtime.calls.request import CallRequest
from phalanx.runtime.groups.ask import Asked, ask
from phalanx.runtime.groups.core import GroupCore
from phalanx.saving.copies import Snapshot, holders, lost_copies
from phalanx.transport.values import NotReady
from phalanx.wire.messages import HOST

__all__ = ["check_held", "from_peer", "restore", "take"]


def take(core: GroupCore) -> Snapshot:
    """Take a snapshot of a group that this driver owns."""
    with core.restarting:  # neither two at once, nor one beside a change of members
        began = time.monotonic()
        epoch = core.check()
        last = core.life.snapshot
        number, whole = (1, 0) if last is None else (last.number + 1, last.number)
        order = Take(number, whole, core.life.snapshot_epoch == epoch.number)
        ranks = range(epoch.size)
        held_by = holders(epoch.nodes)
        taken: list[Taken] = _send(core, questions.take, Same(order))
        wards = {
            holder: {rank: taken[rank].copy for rank in ranks if held_by[rank] == holder} for holder in ranks
        }
        if epoch.size > 1:
            _send(core, questions.hold, Same(number), Same(whole), Each([wards[rank] for rank in ranks]))
        found = Snapshot(
            number,
            held_by,
            sum(one.nbytes for one in taken),
            sum(one.sent_bytes for one in taken) if epoch.size > 1 else 0,
            time.monotonic() - began,
        )
        core.life.snapshot, core.life.snapshot_epoch = found, epoch.number
        core.rules = replace(core.rules, spare=True)  # ranks that live are worth something now
        return found


def _send(core: GroupCore, function: Callable[..., Any], *arguments: Same | Each) -> list[Any]:
    ranks = range(core.world_size)
    plan = CallPlan(ranks, (Same(function), *arguments), {}, GatherPlan("list", ranks))
    return core.send(CallRequest(plan, MethodSpec(HOST, title="px.snapshot"), "")).result(None)


def check_held(core: GroupCore, gone: Collection[int]) -> Snapshot:
    """The snapshot that a group can go back to without some of its ranks.

    Raises:
        GroupBroken: there is none, or the copies of some states were lost with their holders.
    """
    found = core.life.snapshot
    if found is None:
        raise GroupBroken(
            f"px.replace({core.name}): there is no snapshot of the group, so that the state of ranks {sorted(gone)} "
            "is lost. Call px.snapshot(group) after a step; or say state='peer' where all ranks have the same state, "
            "state='none' where they need none; or restart() and load what was saved",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    lost = lost_copies(found.holders, gone)
    if lost:
        told = ", ".join(f"of rank {rank} (held by rank {found.holders[rank]})" for rank in lost)
        raise GroupBroken(
            f"px.replace({core.name}): {found} cannot be restored: the only other copy of the state {told} is lost "
            "too. restart() makes all ranks anew; px.load brings back what was saved",
            group=core.name,
            cause=core.lifecycle.cause,
        )
    return found


def restore(core: GroupCore, found: Snapshot, new: Collection[int], seconds: float) -> None:
    """Bring all ranks back to a snapshot: those that are ``new`` from the copies that others hold."""
    wanted = {rank: found.holders[rank] for rank in new}
    given = {
        rank: _answer(core, "px.replace", holder, questions.give, rank, found.number, seconds=seconds)
        for rank, holder in wanted.items()
    }
    orders: Mapping[int, Restore] = {
        rank: Restore(found.number, given.get(rank)) for rank in range(core.world_size)
    }
    for one in [ask(core, "px.replace", [rank], questions.restore, order) for rank, order in orders.items()]:
        _only(core, one, seconds)


def _answer(
    core: GroupCore, what: str, rank: int, function: Callable[..., Any], *args: Any, seconds: float
) -> Any:
    return _only(core, ask(core, what, [rank], function, *args), seconds)


def _only(core: GroupCore, asked: Asked, seconds: float) -> Any:
    """The answer of one rank.

    Raises:
        CallTimeout: it gave none within so many seconds.
        PhalanxError: it failed, or was lost.
    """
    (answer,) = asked.answers(seconds).values()
    if isinstance(answer, NotReady):
        raise CallTimeout(
            f"group {core.name!r}: {answer}, for {seconds:g} s, while states were brought back after a replacement; "
            "restart() makes all ranks anew",
            group=core.name,
            method=asked.watch.method,
            timeout=seconds,
        )
    if isinstance(answer, BaseException):
        raise answer
    return answer


def from_peer(core: GroupCore, new: Collection[int], seconds: float) -> None:
    """Give ranks that are ``new`` the state of a rank that is not."""
    peer = next(rank for rank in range(core.world_size) if rank not in new)
    copy = _answer(core, "px.replace", peer, questions.show, seconds=seconds)
    for rank in new:
        _answer(core, "px.replace", rank, questions.restore, Restore(0, copy, keep_rng=True), seconds=seconds)
