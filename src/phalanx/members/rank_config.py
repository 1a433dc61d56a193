"""Configuration of each rank of a group: its place, its devices, its environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.backends.backend_types import Endpoint
from phalanx.display.log_merging import label_of
from phalanx.group.group import Group
from phalanx.group.resize_plan import fitted
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.topology.accelerators import in_use
from phalanx.topology.environment import THREADS, rank_environment
from phalanx.topology.slots import SlotView
from phalanx.wire.messages import STORE_VARIABLE, RankConfig

_LABEL_LENGTH = 80


def setups_of(
    core: Group, pool: ResourcePool, endpoints: Sequence[Endpoint], name: str, epoch: int, server: int
) -> list[RankConfig]:
    """Return the configs by rank; ``server`` is the rank that serves torch's store: a new rank with a port for it."""
    options, size = core.options, len(endpoints)
    view = SlotView(tuple(endpoint.slot for endpoint in endpoints))
    folder = session.unused(folder_name(name, epoch))
    devices_on, slots_on = _devices_by_node(pool, endpoints), _slots_by_node(pool, endpoints)
    # Variables that Ray sets before the process starts belong to the group too: they override our defaults.
    given = {**(options.runtime_env or {}).get("env_vars", {}), **options.env}
    address, port = endpoints[server].facts.slot.node_ip, endpoints[server].facts.store_port
    setups: list[RankConfig] = []
    for rank, endpoint in enumerate(endpoints):
        facts, holding = endpoint.facts.slot, pool.holdings[endpoint.slot.pool]
        kind = in_use(holding.resource, {}) if holding.resource else None
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
            # From a rank without any, CUDA is hidden, whose mask torch reads before anything else.
            accelerator=kind or (None if facts.accelerator_ids else in_use("GPU", {})),
            cpus_of_node=facts.cpus_of_node,
            slots_on_node=slots_on[facts.node_id],
            threads=facts.threads,
            group_env=given,
        )
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
                threads=_threads(environment),
                meshes={name: fitted(mesh, size) for name, mesh in options.meshes.items()},
                asynchronous=options.max_concurrency is not None,
                files=_files(endpoint.facts.folder, folder, rank),
                label=label_of(core.card.classes.items()),
                serves=rank == server,
                had_weights=dict(core.had_weights),
                published_weights=dict(core.published_weights),
            )
        )
    return setups


def _threads(environment: Mapping[str, str]) -> int | None:
    """How many threads torch is to use where it was imported before the environment was set."""
    text = environment.get(THREADS, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _slots_by_node(pool: ResourcePool, endpoints: Sequence[Endpoint]) -> Counter[str]:
    """How many slots the blocks have that the ranks are in: other groups on them work at the same time."""
    by_block: dict[tuple[str, int], Counter[str]] = {}
    for endpoint in endpoints:
        block = by_block.setdefault((endpoint.slot.pool, endpoint.slot.block), Counter())
        block[endpoint.facts.slot.node_id] += 1
    found: Counter[str] = Counter()
    for (name, block), ranks in by_block.items():
        spread = len(ranks) > 1  # a placement group that is not ours
        found.update(ranks if spread else dict.fromkeys(ranks, pool.holdings[name].blocks[block]))
    return found


def _devices_by_node(pool: ResourcePool, endpoints: Sequence[Endpoint]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for endpoint in endpoints:
        ids = pool.holdings[endpoint.slot.pool].accelerators.get(endpoint.slot, ())
        found.setdefault(endpoint.facts.slot.node_id, []).extend(ids)
    return {
        node: tuple(
            sorted(dict.fromkeys(ids), key=lambda i: (not i.isdigit(), int(i) if i.isdigit() else 0, i))
        )
        for node, ids in found.items()
    }


def folder_name(group: str, epoch: int) -> str:
    """Return a name for the folder of a group that is safe in a path: ``<group>-<epoch>``. Pure."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", group)[:_LABEL_LENGTH].lstrip(".") or "group"
    return f"{safe}-{epoch}"


def _files(own: str, folder: str, rank: int) -> str:
    return f"{own}/{session.run_id}/{folder}/rank-{rank}" if own else ""
