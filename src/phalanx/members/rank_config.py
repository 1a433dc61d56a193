"""Configuration of each rank of a group: its place, its devices, its environment."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from phalanx.backends.backend_types import Endpoint
from phalanx.group.options import GroupOptions
from phalanx.group.resize_plan import fitted
from phalanx.pools.pool import ResourcePool
from phalanx.session.session import session
from phalanx.topology.accelerators import Accelerator, in_use
from phalanx.topology.environment import THREADS, rank_environment
from phalanx.topology.slots import SlotView
from phalanx.wire.messages import STORE_VARIABLE, RankConfig

_LABEL_LENGTH = 80


def setups_of(
    pool: ResourcePool,
    endpoints: Sequence[Endpoint],
    name: str,
    label: str,
    epoch: int,
    options: GroupOptions,
    server: int,
) -> list[RankConfig]:
    """Return the configs by rank; ``server`` is the rank that serves torch's store: a new rank with a port for it."""
    world = _RankSettings(pool, endpoints, options, server, epoch)
    folder = session.unused(folder_name(name, epoch))
    setups: list[RankConfig] = []
    for rank, endpoint in enumerate(endpoints):
        facts = endpoint.facts.slot
        environment = world.environment(rank)
        own, kind = world.devices(endpoint)
        setups.append(
            RankConfig(
                rank=rank,
                world_size=len(endpoints),
                local_rank=world.view.local_ranks[rank],
                local_world_size=world.view.local_world_sizes[rank],
                group=name,
                epoch=epoch,
                environment=environment,
                host=facts.host,
                node_id=facts.node_id,
                accelerator_ids=own,
                device_type=kind.torch_device if kind and own else "cpu",
                local_device=int(environment["LOCAL_RANK"]) if own else 0,
                threads=_threads(environment),
                meshes={name: fitted(mesh, len(endpoints)) for name, mesh in options.meshes.items()},
                asynchronous=options.max_concurrency is not None,
                files=_files(endpoint.facts.folder, folder, rank),
                label=label,
                serves=rank == server,
            )
        )
    return setups


class _RankSettings:
    """Sources of the environment of ranks, looked up once for all."""

    def __init__(
        self,
        pool: ResourcePool,
        endpoints: Sequence[Endpoint],
        options: GroupOptions,
        server: int,
        epoch: int,
    ) -> None:
        self._pool = pool
        self._endpoints = endpoints
        self._options = options
        self.view = SlotView(tuple(endpoint.slot for endpoint in endpoints))
        first = endpoints[server].facts
        self._address, self._port = first.slot.node_ip, first.store_port
        self._store = f"{self._address}:{self._port}/{epoch}"
        self._on_node = _devices_by_node(pool, endpoints)
        self._slots_on = _slots_by_node(pool, endpoints)
        # Variables that Ray sets before the process starts belong to the group too: they override our defaults.
        self._given = {**(options.runtime_env or {}).get("env_vars", {}), **options.env}

    def devices(self, endpoint: Endpoint) -> tuple[tuple[str, ...], Accelerator | None]:
        """Return the accelerators of a rank, and the kind of accelerator of its pool."""
        holding = self._pool.holdings[endpoint.slot.pool]
        kind = in_use(holding.resource, {}) if holding.resource else None
        return holding.accelerators.get(endpoint.slot, endpoint.facts.slot.accelerator_ids), kind

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of a rank."""
        endpoint = self._endpoints[rank]
        facts = endpoint.facts.slot
        own, kind = self.devices(endpoint)
        environment = rank_environment(
            rank=rank,
            world_size=len(self._endpoints),
            local_rank=self.view.local_ranks[rank],
            local_world_size=self.view.local_world_sizes[rank],
            master_addr=self._address,
            master_port=self._port,
            visible=self._options.visible_devices,
            own_ids=own,
            node_ids=self._on_node[facts.node_id],
            accelerator=kind or _hidden(facts.accelerator_ids),
            cpus_of_node=facts.cpus_of_node,
            slots_on_node=self._slots_on[facts.node_id],
            threads=facts.threads,
            group_env=self._given,
        )
        environment[STORE_VARIABLE] = self._store
        return environment


def _threads(environment: Mapping[str, str]) -> int | None:
    """How many threads torch is to use where it was imported before the environment was set."""
    text = environment.get(THREADS, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _hidden(seen: tuple[str, ...]) -> Accelerator | None:
    """Return the accelerator to hide from a rank without any: CUDA, whose mask torch reads before anything else."""
    return None if seen else in_use("GPU", {})


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
