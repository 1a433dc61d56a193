"""Starting a group: processes first, then ranks in their true order, then the users' objects.

Also the calls of a start: constructors, and the calls that a restart makes again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from phalanx.backends.backend_types import (
    Endpoint,
    Facade,
    Reservation,
    ReserveRequest,
    RuntimeFactory,
    SpawnRequest,
    Ticket,
)
from phalanx.calls.call import Call
from phalanx.calls.call_state import Results
from phalanx.calls.compose import encode_body
from phalanx.calls.listeners import everywhere
from phalanx.calls.run_on import submit_unchecked
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.errors import PlacementError
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.options import GroupOptions
from phalanx.members.rank_config import setups_of
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.topology.slots import Slot
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.messages import STORE_VARIABLE, Message, RankConfig, library_call
from phalanx.worker.handlers import make_runtime, rejoin

#: Variables by which ranks find each other, sent again to ranks that rejoin.
_MEETING = ("MASTER_ADDR", "MASTER_PORT", STORE_VARIABLE)


_NONE: Mapping[int, Endpoint] = MappingProxyType({})


@dataclass(frozen=True)
class Processes:
    """Names of a group's processes for users of the backend, and the factory of their runtime.

    ``names`` are by slot. Left out, a process bears the names of the classes and offers their registered methods.
    """

    class_name: str
    methods: tuple[Facade, ...]
    names: tuple[str, ...] | None = None
    namespace: str | None = None
    factory: RuntimeFactory = make_runtime


@dataclass
class Launched:
    """Processes that are becoming ranks, in their order: a ticket ends when its rank's constructors have returned."""

    endpoints: list[Endpoint]
    tickets: list[Ticket]
    extras: Reservation | None
    setups: list[RankConfig]


def launch(
    core: Group,
    pool: ResourcePool,
    epoch: int,
    *,
    trace: str = "",
    kept: Mapping[int, Endpoint] = _NONE,
    places: Sequence[Slot] = (),
    name: str = "",
    processes: Processes | None = None,
    amend: Callable[[RankConfig], RankConfig] | None = None,
) -> Launched:
    """Start a process per slot and send each process its rank config; does not wait for the constructors.

    Args:
        core: the group, which says what ranks are made of.
        pool: the slots.
        epoch: the epoch whose ranks they will be.
        trace: id of the trace for which ranks record events.
        kept: processes that are ranks already, by rank: only the other ranks are set up, and returned.
        places: slot of each rank, if new ranks join a world with the kept ranks; a new rank serves its store then.
            Without, new ranks get the numbers after the kept ranks.
        name: name by which ranks know the group, if it differs from its own name.
        processes: their names and runtime; None: those of the group's classes.
        amend: changes each rank's config before it is sent.

    Raises:
        PlacementError: the processes, or the extra resources of the group, cannot be had.
    """
    deadline = time.monotonic() + core.options.start_timeout
    name, backend = name or core.name, pool.backend_api
    if any(h.accelerators_per_slot > 1 and h.max_colocate_count > 1 for h in pool.holdings.values()):
        pool.locate()  # Ray shows such a process only one of its slot's accelerators
    new = [rank for rank in range(pool.world_size) if rank not in kept]
    slots = {rank: (places or pool.slots)[rank] for rank in new}
    extras = None if places else _reserve_extras(pool, list(slots.values()), name, core.options)
    endpoints: list[Endpoint] = []
    try:
        request = _request(core, pool, slots, processes or _processes(core))
        endpoints = backend.spawn(replace(request, timeout=max(0.1, deadline - time.monotonic())))
        everyone = _in_rank_order(pool, [*kept.values(), *endpoints], places)
        setups = setups_of(core, pool, everyone, name, epoch, new[0] if places else 0)
        told = [replace(setups[rank], trace=trace, rejoining=bool(places)) for rank in new]
        told = told if amend is None else [amend(setup) for setup in told]
        ordered = [everyone[rank] for rank in new]
        for endpoint, setup in zip(ordered, told, strict=True):
            endpoint.facts = endpoint.facts._replace(files=setup.files)
        tickets = _send(core, ordered, told)
        shown = session.show_ranks if core.options.show_ranks is None else core.options.show_ranks
        session.display.begin(backend, ordered, told[0].label, shown)
    except BaseException:
        backend.kill(endpoints)
        if extras is not None:
            backend.release(extras.keys)
        raise
    return Launched(ordered, tickets, extras, told)


def _reserve_extras(
    pool: ResourcePool, slots: Sequence[Slot], name: str, options: GroupOptions
) -> Reservation | None:
    """CPUs, memory and custom resources that the group asks for beside its slots, on the slots' own nodes."""
    bundle = options.extras()
    if not bundle:
        return None
    backend = pool.backend_api
    reservations = {key: holding.reservation for key, holding in pool.holdings.items()}
    nodes = backend.nodes_of(slots, reservations)
    prefix = next(iter(pool.holdings.values())).reservation_name
    request = ReserveRequest(
        name=f"{prefix}-{name}-extras",
        blocks=(1,) * len(nodes),
        bundle=bundle,
        detached=options.detached,
        timeout=options.start_timeout,
        on_nodes=tuple(nodes),
    )
    return backend.reserve(request)


def _processes(core: Group) -> Processes:
    methods = [
        Facade(f"{role}__{method}" if role else method, role, method)
        for role, bound in core.roles.items()
        for method in bound.methods
    ]
    names = tuple(f"{core.name}:{index}" for index in range(core.world_size))
    class_name = "_".join(bound.cls.__name__ for bound in core.roles.values())
    return Processes(class_name, tuple(methods), names if core.options.detached else None)


def _request(
    core: Group, pool: ResourcePool, slots: Mapping[int, Slot], processes: Processes
) -> SpawnRequest:
    """Return the request for processes on ``slots``, by rank."""
    holding = next(iter(pool.holdings.values()))
    shares = [h.share() for h in pool.holdings.values()]
    if any(share != shares[0] for share in shares):
        raise PlacementError(
            f"group {core.name!r} cannot be started on {pool!r}: its parts give different shares to a process "
            f"({shares}); merge pools with the same use_gpu, accelerators_per_slot and max_colocate_count"
        )
    return SpawnRequest(
        class_name=processes.class_name,
        methods=processes.methods,
        slots=tuple(slots.values()),
        reservations={key: h.reservation for key, h in pool.holdings.items()},
        resources=holding.share(),
        factory=processes.factory,
        names=processes.names and tuple(processes.names[rank] for rank in slots),
        namespace=processes.namespace,
        runtime_env=core.options.runtime_env,
        max_concurrency=core.options.max_concurrency,
        detached=core.options.detached,
    )


def _in_rank_order(
    pool: ResourcePool, endpoints: Sequence[Endpoint], places: Sequence[Slot]
) -> list[Endpoint]:
    """By the ranks that they have at ``places``, or else by where they turned out to be."""
    by_slot = {endpoint.slot: endpoint for endpoint in endpoints}
    learnt = pool.learn({slot: e.facts.slot for slot, e in by_slot.items()})
    return [by_slot[slot] for slot in places or learnt]


def _send(core: Group, endpoints: Sequence[Endpoint], setups: Sequence[RankConfig]) -> list[Ticket]:
    """Send classes and arguments, encoded, and stored if large, once for all ranks."""
    made = {role: (bound.cls, bound.args, bound.kwargs) for role, bound in core.roles.items()}
    body, refs = encode_body(core, made)
    return [
        core.backend.setup(endpoint, setup.pack(body), refs)
        for endpoint, setup in zip(endpoints, setups, strict=True)
    ]


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
        everywhere,
        acts=False,
        is_init=True,
        limit=core.options.start_timeout,
    )
    call.tell(call.heard.planned)
    try:
        yield call
    except BaseException as error:
        if call.was_sent:
            call.arrivals.disregard()
        call.tell_end(error)
        raise


def sent_to(call: Call, epoch: Epoch, tickets: Sequence[Ticket]) -> None:
    """Note that the processes of an epoch exist, and have received their rank configs."""
    call.epoch = epoch
    call.arrivals = Results(call.core.backend, tickets)
    for _ in tickets:
        call.tell(call.heard.composed, Message(""))
        call.tell(call.heard.posted)
    call.note_sent(0)


def rejoin_calls(
    core: Group, launched: Launched, staying: Mapping[int, Endpoint], epoch: int
) -> list[Ticket]:
    """Run ``rejoin()`` on the ranks that stay while the others are made; return the tickets of all, by rank."""
    environment = launched.setups[0].environment
    message = library_call(rejoin, epoch, {name: environment[name] for name in _MEETING})
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
        again = entry.messages(number, epoch.number, trace)
        plan = CallPlan(entry.ranks, (), {}, GatherPlan("list", range(len(entry.ranks))))
        limit = core.options.start_timeout
        call = submit_unchecked(core, epoch, plan, entry.role, entry.method, again, number, limit=limit)
        call.result(None)
