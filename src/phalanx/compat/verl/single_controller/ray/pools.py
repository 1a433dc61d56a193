"""Pools of slots on Ray placement groups: names of ``verl.single_controller.ray.base``.

A pool is reserved when its placement groups are requested: all of them or none, by the library's own reservation, which
rejects requests at once that are too large for the cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from phalanx.backends.backend_types import ReserveRequest
from phalanx.backends.ray.cluster import Connection
from phalanx.compat.verl import overlay
from phalanx.compat.verl.single_controller.base.decorator import CheckFailed
from phalanx.compat.verl.single_controller.base.worker_group import ResourcePool
from phalanx.errors import PlacementError
from phalanx.topology.placement import NodeCapacity, bundle_resources

if TYPE_CHECKING:
    from phalanx.compat.verl.single_controller.ray import native

#: Options in which merged pools must agree.
_SAME_IN_BOTH = {
    "use_gpu": "Both RayResourcePool must either use_gpu or not",
    "max_colocate_count": "Both RayResourcePool must has the same max_colocate_count",
}


class NoFreePort(CheckFailed, RuntimeError):
    """No port of the given range is free."""


class NotEnoughGpus(PlacementError, ValueError):
    """The cluster has fewer accelerators than the pools ask for."""


def resource_name(device_name: str) -> str:
    """Return Ray's resource name for a device name of torch, as the platform of the installed verl has it."""
    if not overlay.active():
        return "NPU" if device_name == "npu" else "GPU"
    return importlib.import_module("verl.plugin.platform").get_platform().ray_resource_name()


def _cpus_beside(pool: RayResourcePool, nodes: Sequence[NodeCapacity]) -> float | None:
    """Return the number of CPUs of a slot with an accelerator, as in verl, whose rollout servers use them.

    None without the overlay, or if the cluster has fewer CPUs; ranks need none of them.
    """
    cpus = float(pool.max_colocate_count)
    have = [node.total.get("CPU", 0.0) for node in nodes]
    fits = sum(have) >= cpus * pool.world_size and max(have, default=0.0) >= cpus * max(pool.store, default=0)
    return cpus if overlay.active() and fits else None


class RayResourcePool(ResourcePool):
    """Slots on Ray: one placement group per entry of ``process_on_nodes``.

    Args:
        process_on_nodes: slots on each node.
        use_gpu: whether a slot has an accelerator.
        name_prefix: prefix of the placement groups' names; random by default.
        max_colocate_count: number of groups that share the slots; each gets an equal part of the accelerators.
        accelerator_type: type of the nodes' accelerators; None for any type.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        *,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = secrets.token_hex(4) if name_prefix is None else name_prefix
        self.pgs: list[PlacementGroup] | None = None
        self.accelerator_type = accelerator_type
        self._connection: Connection | None = None  # to the cluster on which the slots were reserved

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": None}  # another process has its own

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Return the placement groups, by node address. The first call reserves them.

        Raises:
            PlacementError: if the cluster cannot hold them, with a table of its resources; or if this process has left
                the cluster on which they were reserved.
        """
        if self._connection is not None and not self._connection.open:
            raise PlacementError(
                f"the slots of pool {self.name_prefix!r} were reserved on a cluster that this process has left: make "
                "a new pool"
            )
        if self.pgs is None:
            # This module loads the runtime, and most processes make no pools.
            from phalanx.compat.verl.single_controller.ray import native

            backend = native.backend()
            resource = resource_name(device_name) if self.use_gpu else None
            cpus = _cpus_beside(self, backend.nodes()) if resource else None
            prefix = name or f"{self.name_prefix}verl_group_{'_'.join(map(str, self._store))}"
            request = ReserveRequest(
                name=prefix,
                blocks=tuple(self._store),
                bundle=bundle_resources(resource, 1, self.accelerator_type, cpus),
                strategy=strategy,
                names=tuple(f"{prefix}:{index}" for index in range(len(self._store))),
            )
            self.pgs = sort_placement_group_by_node_ip(list(backend.reserve(request).ids))
            self._connection = Connection()
        return self.pgs

    def _places(self) -> list[tuple[int, int]]:
        """Return by rank the indices of the placement group and of its bundle."""
        groups = self.get_placement_groups()
        sizes = _fitted(self._store, groups)
        return [(index, bundle) for index, size in enumerate(sizes) for bundle in range(size)]


class SubRayResourcePool(RayResourcePool):
    """Consecutive slots of existing placement groups."""

    def __init__(
        self,
        placement_groups: list[PlacementGroup],
        start_bundle_index: int,
        subgroup_world_size: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pgs = placement_groups
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size

    @property
    def world_size(self) -> int:
        """Number of slots."""
        return self.subgroup_world_size

    def _places(self) -> list[tuple[int, int]]:
        flat = [(index, bundle) for index, pg in enumerate(self.pgs) for bundle in range(pg.bundle_count)]
        stop = self.start_bundle_index + self.subgroup_world_size
        if stop > len(flat):
            raise CheckFailed(
                f"slots {self.start_bundle_index} to {stop - 1} of placement groups with {len(flat)} bundles: "
                "expected slots within these bundles"
            )
        return flat[self.start_bundle_index : stop]


def _fitted(sizes: list[int], groups: list[PlacementGroup]) -> list[int]:
    """Return ``sizes`` in the order of the groups, which were sorted by node address."""
    counts = [pg.bundle_count for pg in groups]
    if sorted(sizes) == sorted(counts):
        return counts
    if len(sizes) != len(groups) or any(size > count for size, count in zip(sizes, counts, strict=True)):
        raise CheckFailed(
            f"a pool of {sizes} on placement groups of {counts} bundles: expected a group for each node, large enough"
        )
    return sizes


def native_pool(pool: RayResourcePool, device_name: str, use_gpu: bool) -> native.ResourcePool:
    """Return the library's own pool on the slots of ``pool``, in rank order. It does not own the slots."""
    from phalanx.compat.verl.single_controller.ray import native

    groups = pool.get_placement_groups(device_name=device_name)
    places = pool._places()
    if not places:
        raise CheckFailed(
            f"the pool {pool.name_prefix!r} has no slots; give it process_on_nodes, such as [8]"
        )
    return native.pool_on(
        pool.name_prefix,
        groups,
        places,
        resource=resource_name(device_name) if use_gpu else None,
        max_colocate_count=pool.max_colocate_count,
    )


def sort_placement_group_by_node_ip(pgs: list[PlacementGroup]) -> list[PlacementGroup]:
    """Sort placement groups by node address (as text, like verl), then in order of creation."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def key(pg: PlacementGroup) -> str:
        return addresses.get(placement_group_table(pg)["bundles_to_node_id"].get(0), "")

    return sorted(pgs, key=key)


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Return a pool of both pools' slots. Its groups share the accelerators with groups of the two pools.

    Raises:
        CheckFailed: if one is a part of a pool, or they differ in use_gpu or max_colocate_count.
    """
    if isinstance(rp1, SubRayResourcePool) or isinstance(rp2, SubRayResourcePool):
        raise CheckFailed("a part of a pool cannot be merged: merge the pools, and split the result")
    for option, rule in _SAME_IN_BOTH.items():
        if getattr(rp1, option) != getattr(rp2, option):
            raise CheckFailed(
                f"{rule}: {option} is {getattr(rp1, option)} in one pool and {getattr(rp2, option)} in the other; make "
                "both with the same"
            )
    merged = RayResourcePool(
        rp1.store + rp2.store,
        rp1.use_gpu,
        f"{rp1.name_prefix}_{rp2.name_prefix}",
        rp1.max_colocate_count,
        accelerator_type=rp1.accelerator_type if rp1.accelerator_type == rp2.accelerator_type else None,
    )
    merged.pgs = sort_placement_group_by_node_ip(rp1.get_placement_groups() + rp2.get_placement_groups())
    merged._connection = rp1._connection or rp2._connection
    return merged


def split_resource_pool(
    resource_pool: RayResourcePool, split_size: int | list[int]
) -> list[SubRayResourcePool]:
    """Split a pool into pools of consecutive slots, of ``split_size`` each or of the listed sizes.

    Raises:
        CheckFailed: if the sizes are not positive, or do not add up to the pool's size.
    """
    world_size = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or world_size % split_size:
            raise CheckFailed(
                f"split_size must be a divisor of world_size, or a list of sizes, but is {split_size} for a pool of "
                f"{world_size}"
            )
        sizes = [split_size] * (world_size // split_size)
    else:
        sizes = [int(size) for size in split_size]
        if sum(sizes) != world_size or min(sizes, default=0) < 1:
            raise CheckFailed(
                f"split_size must sum up to world_size, {world_size}, of positive sizes, but is {sizes}"
            )
    start = int(getattr(resource_pool, "start_bundle_index", 0))
    starts = [start + sum(sizes[:index]) for index in range(len(sizes))]
    groups = resource_pool.get_placement_groups()
    parts = [
        SubRayResourcePool(
            placement_groups=groups,
            start_bundle_index=begin,
            subgroup_world_size=size,
            process_on_nodes=resource_pool.store,
            use_gpu=resource_pool.use_gpu,
            name_prefix=f"{resource_pool.name_prefix}_split_{index}",
            max_colocate_count=resource_pool.max_colocate_count,
            accelerator_type=resource_pool.accelerator_type,
        )
        for index, (begin, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    for part in parts:
        part._connection = resource_pool._connection
    return parts


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    Attributes:
        resource_pool_spec: pool name to slots by node.
        mapping: role to pool name.
        max_colocate_count: ``max_colocate_count`` of every pool.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create all pools, and check that the cluster has enough accelerators. Raises NotEnoughGpus if it has not."""
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes,
                use_gpu=True,
                name_prefix=name,
                max_colocate_count=self.max_colocate_count,
            )
        self._check_resource_available()

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of accelerators of all pools."""
        return sum(map(sum, self.resource_pool_spec.values()))

    def _check_resource_available(self) -> None:
        from phalanx.compat.verl.single_controller.ray import native

        nodes = native.backend().nodes()
        total = sum(node.total.get("GPU", node.total.get("NPU", 0.0)) for node in nodes)
        if total < self.get_n_gpus():
            raise NotEnoughGpus(
                f"Total available GPUs {total} is less than total desired GPUs {self.get_n_gpus()}: the pools ask for "
                f"{self.resource_pool_spec}; make them smaller, or start Ray on more accelerators"
            )


def _free_port(port_range: list[int] | None) -> int:
    for port in range(*map(int, port_range or (0, 1))):
        with contextlib.suppress(OSError), socket.create_server(("", port)) as probe:
            return probe.getsockname()[1]
    raise NoFreePort(
        f"Could not find a free port in range {port_range}: give a larger range, [first, last), the last excluded"
    )


@ray.remote(num_cpus=0)
def get_master_addr_port(master_port_range: list[int] | None = None) -> tuple[str, str]:
    """Return the address of this task's node and a free port there, the first of the range if it is given."""
    return ray.util.get_node_ip_address().strip("[]"), str(_free_port(master_port_range))
