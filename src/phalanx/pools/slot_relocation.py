"""Check whether slots on draining nodes fit on other nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.pools.pool import ResourcePool
from phalanx.topology.placement import NodeCapacity, check_feasible
from phalanx.topology.slots import Slot

Block = tuple[str, int]
"""Of which pool it is, and its number there."""


def room_elsewhere(pool: ResourcePool) -> bool:
    """Return whether the other nodes now have capacity for the slots of the pool on draining nodes."""
    backend = pool.backend_api
    going = {node.node_id for node in backend.draining_nodes()}
    reservations = {name: holding.reservation for name, holding in pool.holdings.items()}
    lost = going_blocks(pool.slots, backend.nodes_of(pool.slots, reservations), going)
    bundles = {name: holding.bundle for name, holding in pool.holdings.items()}
    return has_room([node for node in backend.nodes() if node.node_id not in going], lost, bundles)


def going_blocks(slots: Sequence[Slot], nodes: Sequence[str], going: set[str]) -> dict[Block, int]:
    """The blocks on nodes that go, each with how many slots it has; pure."""
    found: dict[Block, int] = {}
    for slot, node in zip(slots, nodes, strict=True):
        if node in going:
            found[slot.pool, slot.block] = found.get((slot.pool, slot.block), 0) + 1
    return found


def has_room(
    nodes: Sequence[NodeCapacity], lost: Mapping[Block, int], bundles: Mapping[str, Mapping[str, float]]
) -> bool:
    """Return whether the lost blocks of each pool alone fit on ``nodes`` next to present reservations. Pure."""
    for pool, bundle in bundles.items():
        sizes = [size for (name, _), size in lost.items() if name == pool]
        if sizes and not check_feasible(nodes, sizes, bundle).fits_now:
            return False
    return True
