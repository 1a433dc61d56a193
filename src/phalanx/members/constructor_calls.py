"""The calls of a start: constructors, and the calls that a restart makes again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from phalanx.backends.backend_types import Endpoint, Ticket
from phalanx.calls.call import Call
from phalanx.calls.call_state import Results
from phalanx.calls.listeners import Listeners, everywhere
from phalanx.calls.send import submit
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.members.launch import Launched
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.messages import STORE_VARIABLE, Message, library_call
from phalanx.worker.handlers import Rejoin, rejoin

#: Variables by which ranks find each other, sent again to ranks that rejoin.
_MEETING = ("MASTER_ADDR", "MASTER_PORT", STORE_VARIABLE)


def constructors(core: Group, ranks: range | None = None) -> Call:
    """Return the call of the constructors of the new epoch, or of some of its ranks.

    The caller ends the processes if the call fails.
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
        everywhere,
        acts=False,
        is_init=True,
        limit=core.options.start_timeout,
    )
    call.tell(call.heard.planned)
    return call


def sent_to(call: Call, epoch: Epoch, tickets: Sequence[Ticket], messages: Iterable[Message] = ()) -> None:
    """Note that the processes of an epoch exist, and have received their rank configs."""
    call.epoch = epoch
    call.arrivals = Results(call.core.backend, tickets)
    for message in messages:
        call.tell(call.heard.composed, message)
        call.tell(call.heard.posted)
    call.note_sent(0)


def given_up(call: Call, error: BaseException) -> None:
    """Note that constructors failed or were interrupted: their remaining results will not be read."""
    if call.was_sent:
        call.arrivals.disregard()
    call.tell_end(error)


def rejoin_calls(
    core: Group, launched: Launched, staying: Mapping[int, Endpoint], epoch: int
) -> list[Ticket]:
    """Run ``rejoin()`` on the ranks that stay while the others are made; return the tickets of all, by rank."""
    environment = launched.setups[0].environment
    message = library_call(rejoin, Rejoin(epoch, {name: environment[name] for name in _MEETING}))
    tickets = {setup.rank: ticket for setup, ticket in zip(launched.setups, launched.tickets, strict=True)}
    tickets |= {rank: core.backend.submit(endpoint, message) for rank, endpoint in staying.items()}
    return [tickets[rank] for rank in sorted(tickets)]


def make_again(core: Group, trace: str = "", joining: range | None = None) -> None:
    """Repeat the calls of the rerun log on the ranks of this epoch, in order.

    On ``joining`` ranks, only calls that went to all ranks with equal arguments are repeated.

    Raises:
        RemoteCallError, WorkerDiedError, CallTimeout: a call failed.
    """
    epoch = core.epoch
    for made in core.reruns.to_make():
        entry = made.within(epoch.size) if joining is None else made.extended(joining)
        if entry is None:
            continue
        number = core.new_number()
        plan = CallPlan(entry.ranks, (), {}, GatherPlan("list", range(len(entry.ranks))))
        call = Call(
            core,
            epoch,
            plan,
            entry.role,
            entry.method,
            number,
            Listeners(),
            acts=False,
            limit=core.options.start_timeout,
        )
        again = entry.messages(number, epoch.number, trace)
        call.arrivals, _ = submit(core, epoch, entry.ranks, again)
        call.result(None)
