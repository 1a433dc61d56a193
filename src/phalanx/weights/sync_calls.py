"""The calls of one sync over one pair: who sends, who receives, and what each of them has to wait for."""

from __future__ import annotations

from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.group.group import Group
from phalanx.weights.pair_setup import Pair
from phalanx.weights.sync_future import PairCalls, SyncFuture
from phalanx.weights.sync_sides import send_to
from phalanx.weights.worker import weight_handlers as questions
from phalanx.weights.worker.weight_requests import SyncRequest
from phalanx.wire.value import Value

__all__ = ["send_pair"]


def send_pair(pair: Pair, order: SyncRequest, last: SyncFuture | None) -> PairCalls:
    """Send a pair's calls, the source's before the target's; ``last`` is the sync before, which may be under way."""
    source, target = pair.source, pair.target
    title = f"weights {target.asked.name!r}"
    stored: Call | None = None
    given: Value = ()
    before = _before(source.core, last)
    if pair.stores:
        stored = send_to(source.core, source.ranks, f"{title}: stored", questions.store, order, *before)
        given = CallFuture(stored)
        if source.core.card.asynchronous:
            before = (*before, given)
    if source.core is target.core and not source.core.transport.immediate:
        ranks = sorted({*source.ranks, *target.ranks})
        sides = ("source", "target")
        both = send_to(source.core, ranks, title, questions.take_part, order, sides, given, *before)
        return PairCalls(pair, stored, (both,))
    sent = send_to(
        source.core, source.ranks, f"{title}: sent", questions.take_part, order, ("source",), (), *before
    )
    if source.core.transport.immediate and sent.has_failed():
        return PairCalls(pair, stored, (sent,))  # its ranks have run: the targets would wait for nothing
    before = _before(target.core, last)
    sides = ("target",)
    try:
        received = send_to(
            target.core,
            target.ranks,
            f"{title}: received",
            questions.take_part,
            order,
            sides,
            given,
            *before,
        )
    except BaseException:
        CallFuture(sent).cancel()
        raise
    return PairCalls(pair, stored, (sent, received))


def _before(core: Group, last: SyncFuture | None) -> tuple[Value, ...]:
    """The calls of the sync before this one on asynchronous ranks, which would else begin with these in any order."""
    if last is None or not core.card.asynchronous or core.transport.immediate:
        return ()
    return tuple(CallFuture(call) for call in last.calls if call.life is core.life and not call.over)
