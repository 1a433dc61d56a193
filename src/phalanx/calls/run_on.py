"""Calls of library functions on the ranks of a group, in the order of each rank's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from phalanx.calls.call import Call
from phalanx.calls.call_state import Results
from phalanx.calls.compose import messages
from phalanx.calls.send import send
from phalanx.calls.values import StoredValue
from phalanx.declare.register import MethodSpec
from phalanx.dispatch.plan import CallPlan, Each, GatherPlan, Same
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.wire.messages import LIBRARY, OUTPUT, Message, RankCall
from phalanx.wire.value import Value


def run_on(
    group: Group,
    function: Callable[..., Any],
    *args: Value,
    ranks: Sequence[int] | None = None,
    each: Sequence[Value] | None = None,
    title: str = "",
    checked: bool = True,
    epoch: Epoch | None = None,
) -> Call:
    """Send ``function(runtime, *args)`` to ranks, after their earlier calls; return the call without waiting.

    Use ``Call.result`` for a value that all ranks must return, and ``Call.answers`` for the values that arrived.

    Args:
        group: the group, ready or not.
        function: a function of the library; ``runtime`` is the rank's ``WorkerRuntime``.
        args: its further arguments, the same for every rank.
        ranks: the called ranks; None: all ranks.
        each: a value for each rank, passed before ``args``.
        title: name of the call in errors and traces.
        checked: if True, the call counts as a call of a user: a group that takes no calls refuses it, and a failure can
            break the group. An unchecked call is also sent while the group starts, is broken or closes, and has no
            effect on its state.
        epoch: the epoch of the ranks, for an unchecked call; None: the present epoch. A checked call ignores it.

    Raises:
        GroupClosed, GroupBroken, StaleEpoch: if a checked call was refused.
    """
    epoch = group.epoch if epoch is None else epoch
    called = tuple(range(epoch.size) if ranks is None else ranks)
    own = () if each is None else (Each(each),)
    plan = CallPlan(
        called, (Same(function), *own, *map(Same, args)), {}, GatherPlan("list", range(len(called)))
    )
    if checked:
        return send(group, plan, MethodSpec(LIBRARY, title=title), "")
    composed = messages(group, plan, RankCall(epoch.number, "", LIBRARY))
    return submit_unchecked(group, epoch, plan.without_arguments(), "", title, composed, group.new_number())


def outputs_on(
    group: Group, function: Callable[..., Any], *args: Value, **options: Any
) -> list[StoredValue[Any]]:
    """Send an unchecked function as :func:`run_on`; return its outputs without waiting, as arguments of other calls.

    Outputs stay on their ranks until other ranks fetch them: they may be large, and this process fetches none.
    """
    call = run_on(group, function, *args, checked=False, **options)
    references = map(call.arrivals.reference, range(len(call.arrivals)))
    return [StoredValue(group.backend, reference.value, 0) for reference in references]


def submit_unchecked(
    group: Group,
    epoch: Epoch,
    plan: CallPlan,
    role: str,
    method: str,
    composed: Iterable[Message],
    number: int,
    *,
    limit: float | None = None,
) -> Call:
    """Submit the messages of a call that has no effect on the state of its group; return it without waiting."""
    call = Call(group, epoch, plan, role, method, number, acts=False, limit=limit)
    handles = [
        group.backend.submit(epoch.endpoints[rank], message, OUTPUT)
        for rank, message in zip(plan.ranks, composed, strict=True)
    ]
    call.arrivals = Results(group.backend, handles)
    call.was_sent = True
    return call
