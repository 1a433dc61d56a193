"""Start of the processes of ranks: their resources, their order as ranks, and their rank configs."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from phalanx.backends.backend_types import Endpoint, Facade, ReserveRequest, ResultHandle, SpawnRequest
from phalanx.calls.compose import encode_body
from phalanx.errors import PlacementError
from phalanx.group.group import Group
from phalanx.members.meshes import fitted
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.topology.environment import accelerator, rank_environment
from phalanx.topology.slots import Slot, SlotView, id_key
from phalanx.wire.messages import STORE_VARIABLE, RankConfig
from phalanx.worker.handlers import make_runtime

_LABEL_LENGTH = 80
_NOT_ENDED = dict.fromkeys(
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"),
    "0",
)
"""Variables by which torch's watchdog of NCCL does not end ranks that lost a peer, nor sleep for a minute."""


@dataclass
class Launched:
    """Processes that become ranks, in rank order.

    A handle in ``results`` ends when its rank's constructors have returned. ``configs`` has the rank configs.
    """

    endpoints: list[Endpoint]
    results: list[ResultHandle]
    configs: list[RankConfig]


def launch(
    core: Group,
    pool: ResourcePool,
    epoch: int,
    *,
    trace: str = "",
    kept: Mapping[int, Endpoint] = MappingProxyType({}),
    places: Sequence[Slot] = (),
    name: str = "",
    amend_request: Callable[[SpawnRequest], SpawnRequest] = lambda request: request,
    amend: Callable[[RankConfig], RankConfig] = lambda config: config,
) -> Launched:
    """Start a process per slot and send each process its rank config; does not wait for the constructors.

    Resources that the group reserves in addition to the slots are added to its ``extras``.

    Args:
        core: the group, with the classes and options of its ranks.
        pool: the slots.
        epoch: number of the epoch of the new ranks.
        trace: id of the trace for which ranks record events.
        kept: processes that are ranks already, by rank: only the other ranks are set up, and returned.
        places: slot of each rank, if new ranks take the places of lost ranks; the first of them then serves the store.
            Empty: new ranks get the numbers after the kept ranks.
        name: name by which ranks know the group, if it differs from the group's own name.
        amend_request: changes names, methods or runtime of the processes before they are started.
        amend: changes each rank's config before it is sent.

    Raises:
        PlacementError: if the processes cannot be placed, or the extra resources of the group cannot be reserved.
    """
    deadline = time.monotonic() + core.options.start_timeout
    name, backend = name or core.name, pool.backend_api
    if any(h.accelerators_per_slot > 1 and h.max_colocate_count > 1 for h in pool.holdings.values()):
        pool.locate()  # Ray shows such a process only one of its slot's accelerators
    new = [rank for rank in range(pool.world_size) if rank not in kept]
    slots = [(places or pool.slots)[rank] for rank in new]
    extras = _reserve_extras(core, pool, [slot for slot in slots if slot not in core.extras], name)
    endpoints = list[Endpoint]()
    try:
        request = amend_request(_request(core, pool, slots, kept))
        _check_names(core, request)
        endpoints = backend.spawn(replace(request, timeout=max(0.1, deadline - time.monotonic())))
        by_slot = {endpoint.slot: endpoint for endpoint in [*kept.values(), *endpoints]}
        in_order = pool.learn({slot: endpoint.facts.slot for slot, endpoint in by_slot.items()})
        # A slot that another thread has added to the pool since has no process.
        everyone = [by_slot[slot] for slot in places or in_order if slot in by_slot]
        setups = _rank_configs(core, pool, everyone, name, epoch, new[0] if places else 0)
        configs = [amend(replace(setups[rank], trace=trace, rejoining=bool(places))) for rank in new]
        ordered = [everyone[rank] for rank in new]
        # Classes and arguments are encoded, and stored if large, once for all ranks.
        body, refs = encode_body(core, {role: (b.cls, b.args, b.kwargs) for role, b in core.roles.items()})
        results = list[ResultHandle]()
        for endpoint, setup in zip(ordered, configs, strict=True):
            endpoint.facts = endpoint.facts._replace(files=setup.files)
            results.append(backend.setup(endpoint, setup.pack(body), refs))
        session.display.begin(backend, everyone, new, configs[0].label, core.options.show_ranks)
    except BaseException:
        backend.kill(endpoints)
        backend.release(list(extras.values()))
        raise
    core.extras |= extras
    return Launched(ordered, results, configs)


def _reserve_extras(core: Group, pool: ResourcePool, slots: Sequence[Slot], name: str) -> dict[Slot, str]:
    """Reserve the CPUs, memory and custom resources that the group needs in addition to its slots, on their nodes."""
    options, bundle = core.options, core.options.extras()
    if not bundle:
        return {}
    first, *_ = pool.holdings
    request = ReserveRequest(
        name=session.unused(f"px-{session.run_id}-{first}-{name}-extras"),
        blocks=(1,) * len(slots),
        bundle=bundle,
        detached=options.detached,
        timeout=options.start_timeout,
        on_nodes=tuple(pool.nodes_of(slots)),
    )
    return dict(zip(slots, pool.backend_api.reserve(request).keys, strict=True))


def _request(
    core: Group, pool: ResourcePool, slots: Sequence[Slot], kept: Mapping[int, Endpoint]
) -> SpawnRequest:
    """Return the request for processes on ``slots`` with the names of their classes and methods."""
    shares = [holding.share for holding in pool.holdings.values()]
    if any(share != shares[0] for share in shares):
        raise PlacementError(
            f"group {core.name!r} cannot be started on {pool!r}: its parts give different shares to a process "
            f"({shares}); merge pools with the same use_gpu, accelerators_per_slot and max_colocate_count"
        )
    methods = [
        Facade(f"{role}__{method}" if role else method, role, method)
        for role, bound in core.roles.items()
        for method in bound.methods
    ]
    # Numbered by slot: ranks are assigned later, so a kept process may have the number of another rank.
    taken = {endpoint.name for endpoint in kept.values()}
    free = (name for number in itertools.count() if (name := f"{core.name}:{number}") not in taken)
    return SpawnRequest(
        class_name="_".join(bound.cls.__name__ for bound in core.roles.values()),
        methods=tuple(methods),
        slots=tuple(slots),
        reservations={key: holding.reservation for key, holding in pool.holdings.items()},
        resources=shares[0],
        factory=make_runtime,
        names=tuple(itertools.islice(free, len(slots))) if core.options.detached else None,
        runtime_env=core.options.runtime_env,
        max_concurrency=core.options.max_concurrency,
        detached=core.options.detached,
    )


def _check_names(core: Group, request: SpawnRequest) -> None:
    """Check that no process has the name of a new rank of a detached group.

    Raises:
        PlacementError: if a group of the same name has such a process; the message says how to call or end the group.
    """
    own = request.names or () if request.namespace is None else ()
    taken = [name for name in own if core.backend.find(name) is not None]
    if taken:
        raise PlacementError(
            f"there is a detached group {core.name!r} on this cluster: px.attach({core.name!r}) returns it, "
            f"px.attach({core.name!r}).close(pool=True) ends it; or give this one another name=. If px.attach finds "
            f"none, a driver is starting it now, or has left {', '.join(taken)} behind: "
            "ray.kill(ray.get_actor(..., namespace='phalanx')) ends each of these"
        )


def _rank_configs(
    core: Group, pool: ResourcePool, endpoints: Sequence[Endpoint], name: str, epoch: int, server: int
) -> list[RankConfig]:
    """Return the configs by rank; ``server`` is the rank that serves torch's store: a new rank with a port for it."""
    options, size = core.options, len(endpoints)
    view = SlotView(tuple(endpoint.slot for endpoint in endpoints))
    folder = session.unused(folder_name(name, epoch))
    devices_on, slots_on = _devices_by_node(pool, endpoints), _slots_by_node(pool, endpoints)
    # Variables that Ray sets before the process starts belong to the group too: they override our defaults.
    given = {
        **(_NOT_ENDED if core.spare else {}),
        **(options.runtime_env or {}).get("env_vars", {}),
        **options.env,
    }
    address, port = endpoints[server].facts.slot.node_ip, endpoints[server].facts.store_port
    setups: list[RankConfig] = []
    for rank, endpoint in enumerate(endpoints):
        facts, holding = endpoint.facts.slot, pool.holdings[endpoint.slot.pool]
        kind = accelerator(holding.resource) if holding.resource else None
        own = holding.accelerators.get(endpoint.slot, facts.accelerator_ids)
        local_rank, local_size = view.local_ranks[rank], view.local_world_sizes[rank]
        environment = rank_environment(
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            master_addr=address,
            master_port=port,
            visible=options.visible_devices,
            own_ids=own,
            node_ids=devices_on[facts.node_id],
            # A rank without accelerators gets a mask that hides CUDA, which torch would otherwise use.
            accelerator=kind or (None if facts.accelerator_ids else accelerator("GPU")),
            cpus_of_node=facts.cpus_of_node,
            slots_on_node=slots_on[facts.node_id],
            threads=facts.threads,
            group_env=given,
        )
        own_folder = endpoint.facts.folder
        setups.append(
            RankConfig(
                rank,
                size,
                local_rank,
                local_size,
                group=name,
                epoch=epoch,
                environment={**environment, STORE_VARIABLE: f"{address}:{port}/{epoch}"},
                host=facts.host,
                node_id=facts.node_id,
                accelerator_ids=own,
                device_type=kind.torch_device if kind and own else "cpu",
                local_device=int(environment["LOCAL_RANK"]) if own else 0,
                meshes={name: fitted(mesh, size) for name, mesh in options.meshes.items()},
                asynchronous=options.max_concurrency is not None,
                files=f"{own_folder}/{session.run_id}/{folder}/rank-{rank}" if own_folder else "",
                label=core.handle.label,
                serves=rank == server,
                had_weights=dict(core.had_weights),
                published_weights=dict(core.published_weights),
            )
        )
    return setups


def _slots_by_node(pool: ResourcePool, endpoints: Sequence[Endpoint]) -> Counter[str]:
    """Return the number of slots on each node, in all blocks with ranks: groups on other slots work concurrently."""
    by_block = defaultdict[tuple[str, int], Counter[str]](Counter)
    for endpoint in endpoints:
        by_block[endpoint.slot.pool, endpoint.slot.block][endpoint.facts.slot.node_id] += 1
    found = Counter[str]()
    for (name, block), ranks in by_block.items():
        is_spread = len(ranks) > 1  # a placement group that is not ours
        found.update(ranks if is_spread else dict.fromkeys(ranks, pool.holdings[name].blocks[block]))
    return found


def _devices_by_node(pool: ResourcePool, endpoints: Sequence[Endpoint]) -> dict[str, list[str]]:
    found = defaultdict[str, set[str]](set)
    for endpoint in endpoints:
        ids = pool.holdings[endpoint.slot.pool].accelerators.get(endpoint.slot, ())
        found[endpoint.facts.slot.node_id].update(ids)
    return {node: sorted(ids, key=lambda own: id_key([own])) for node, ids in found.items()}


def folder_name(group: str, epoch: int) -> str:
    """Return a name for the folder of a group that is safe in a path: ``<group>-<epoch>``. Pure."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", group)[:_LABEL_LENGTH].lstrip(".") or "group"
    return f"{safe}-{epoch}"
