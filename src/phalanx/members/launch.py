"""Starting a group: processes first, then ranks in their true order, then the users' objects.

Also the calls of a start: constructors, and the calls that a restart makes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from phalanx.calls.listeners import Listeners, everywhere
from phalanx.calls.send import submit
from phalanx.declare.bind import BoundClass
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.display.log_merging import label_of
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
from phalanx.worker.factory import make_runtime
from phalanx.worker.handlers import Rejoin, rejoin

Roles = Mapping[str, BoundClass]

#: Variables by which ranks find each other, sent again to ranks that rejoin.
_MEETING = ("MASTER_ADDR", "MASTER_PORT", STORE_VARIABLE)


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


@dataclass(frozen=True)
class Present:
    """The processes that are there when some ranks of a group are launched, by rank.

    Processes that are ``kept`` are ranks already: only the other ranks are set up, and returned. With ``places``, the
    slot of each rank, new ranks join a world with the kept ones, and a new rank serves its store. Without, new ranks
    get the numbers after the kept ones.
    """

    kept: Mapping[int, Endpoint] = field(default_factory=dict[int, Endpoint])
    places: Sequence[Slot] = ()


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
    roles: Roles,
    epoch: int,
    options: GroupOptions,
    *,
    name: str = "",
    processes: Processes | None = None,
    amend: Callable[[RankConfig], RankConfig] | None = None,
    trace: str = "",
    present: Present | None = None,
) -> Launched:
    """Start a process per slot and send each process its rank config; does not wait for the constructors.

    ``present`` are processes that exist already. ``name`` is the name by which ranks know the group, if it differs from
    its own name. ``amend`` may change each rank's config before it is sent; ``trace`` is the id of the trace for which
    ranks record events.

    Raises:
        PlacementError: the processes, or the extra resources of the group, cannot be had.
    """
    deadline = time.monotonic() + options.start_timeout
    present, name = present or Present(), name or core.name
    backend, places = pool.backend_api, present.places
    if any(h.accelerators_per_slot > 1 and h.max_colocate_count > 1 for h in pool.holdings.values()):
        pool.locate()  # Ray shows such a process only one of its slot's accelerators
    new = [rank for rank in range(pool.world_size) if rank not in present.kept]
    slots = tuple((places or pool.slots)[rank] for rank in new)
    extras = None if places else _reserve_extras(pool, slots, name, options)
    endpoints: list[Endpoint] = []
    try:
        request = _request(pool, processes or _processes(pool, roles, name, options), name, options, deadline)
        names = request.names and tuple(request.names[rank] for rank in new)
        endpoints = backend.spawn(replace(request, slots=slots, names=names))
        everyone = _in_rank_order(pool, [*present.kept.values(), *endpoints], places)
        label = label_of((role, bound.cls.__name__) for role, bound in roles.items())
        setups = setups_of(pool, everyone, name, label, epoch, options, new[0] if places else 0)
        told = [_amended(setups[rank], trace, bool(places), amend) for rank in new]
        ordered = [everyone[rank] for rank in new]
        for endpoint, setup in zip(ordered, told, strict=True):
            endpoint.facts = endpoint.facts._replace(files=setup.files)
        tickets = _send(core, ordered, roles, told)
        shown = options.show_ranks if options.show_ranks is not None else session.show_ranks
        session.display.begin(backend, ordered, label, shown)
    except BaseException:
        backend.kill(endpoints)
        if extras is not None:
            backend.release(extras.keys)
        raise
    return Launched(ordered, tickets, extras, told)


def _amended(
    setup: RankConfig, trace: str, rejoining: bool, amend: Callable[[RankConfig], RankConfig] | None
) -> RankConfig:
    setup = replace(setup, trace=trace, rejoining=rejoining) if trace or rejoining else setup
    return setup if amend is None else amend(setup)


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


def _processes(pool: ResourcePool, roles: Roles, name: str, options: GroupOptions) -> Processes:
    methods = [
        Facade(f"{role}__{method}" if role else method, role, method)
        for role, bound in roles.items()
        for method in bound.methods
    ]
    return Processes(
        class_name="_".join(bound.cls.__name__ for bound in roles.values()),
        methods=tuple(methods),
        names=tuple(f"{name}:{index}" for index in range(pool.world_size)) if options.detached else None,
    )


def _request(
    pool: ResourcePool, processes: Processes, name: str, options: GroupOptions, deadline: float
) -> SpawnRequest:
    holding = next(iter(pool.holdings.values()))
    shares = [h.share() for h in pool.holdings.values()]
    if any(share != shares[0] for share in shares):
        raise PlacementError(
            f"group {name!r} cannot be started on {pool!r}: its parts give different shares to a process "
            f"({shares}); merge pools with the same use_gpu, accelerators_per_slot and max_colocate_count"
        )
    return SpawnRequest(
        class_name=processes.class_name,
        methods=processes.methods,
        slots=pool.slots,
        reservations={key: h.reservation for key, h in pool.holdings.items()},
        resources=holding.share(),
        factory=processes.factory,
        names=processes.names,
        namespace=processes.namespace,
        runtime_env=options.runtime_env,
        max_concurrency=options.max_concurrency,
        detached=options.detached,
        timeout=max(0.1, deadline - time.monotonic()),
    )


def _in_rank_order(
    pool: ResourcePool, endpoints: Sequence[Endpoint], places: Sequence[Slot]
) -> list[Endpoint]:
    """By the ranks that they have at ``places``, or else by where they turned out to be."""
    by_slot = {endpoint.slot: endpoint for endpoint in endpoints}
    learnt = pool.learn({slot: e.facts.slot for slot, e in by_slot.items()})
    return [by_slot[slot] for slot in places or learnt]


def _send(
    core: Group, endpoints: Sequence[Endpoint], roles: Roles, setups: Sequence[RankConfig]
) -> list[Ticket]:
    """Classes and arguments are encoded, and stored if large, once for all ranks."""
    made = {role: (bound.cls, bound.args, bound.kwargs) for role, bound in roles.items()}
    body, refs = encode_body(core, made)
    return [
        core.backend.setup(endpoint, setup.pack(body), refs)
        for endpoint, setup in zip(endpoints, setups, strict=True)
    ]


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
