"""Slots that a pool reserves later, and releases."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from phalanx.backends.backend_types import ReserveRequest
from phalanx.display.tables import Table
from phalanx.errors import PlacementError
from phalanx.pools.slot_reservation import SlotReservation, Tenant
from phalanx.topology.slots import PoolShape, Slot


def reserve_more(
    first: SlotReservation, number: int, blocks: Sequence[int], timeout: float
) -> SlotReservation:
    """Reserve blocks of slots like those of a pool's first reservation.

    Raises:
        DeclarationError: these are no blocks.
        PlacementError: the cluster cannot hold them, or did not within ``timeout``; with the table.
    """
    shape = PoolShape(tuple(blocks))
    name = f"{first.reservation_name}.{number}"
    request = ReserveRequest(
        name=name,
        blocks=shape.process_on_nodes,
        bundle=first.bundle,
        detached=first.detached,
        timeout=timeout,
    )
    return replace(
        first,
        pool=f"{first.pool}.{number}",
        reservation=first.backend.reserve(request),
        blocks=shape.process_on_nodes,
        reservation_name=name,
        groups={},
        facts={},
        accelerators={},
        lock=threading.RLock(),
    )


def check_free(pool: str, holding: SlotReservation, slots: Sequence[Slot]) -> None:
    """Check that no group is on slots that are to be given back; ``slots`` are the pool's, by rank.

    Raises:
        PlacementError: a group is on them; the table lists these groups with their ranks there, and how to proceed.
    """
    ranks: dict[int, list[int]] = {}
    tenants: dict[int, Tenant] = {}
    for rank, slot in enumerate(slots):
        for tenant in holding.groups.get(slot, ()) if slot.pool == holding.pool else ():
            tenants[id(tenant)] = tenant
            ranks.setdefault(id(tenant), []).append(rank)
    if not tenants:
        return
    rows = tuple((one.name, one.world_size, ranks[key], one.state) for key, one in tenants.items())
    keep = sum(1 for slot in slots if slot.pool != holding.pool)
    table = Table(
        f"groups on the last {len(slots) - keep} slots of pool {pool}",
        ("group", "ranks", "slots that are to go", "state"),
        rows,
        (
            f"px.resize(group, {keep}) frees the slots of a group whose ranks are independent; with via=folder, those "
            "of another one; close() those of any",
        ),
    )
    raise PlacementError(
        f"pool {pool} cannot shrink: groups are on the slots that it would give back\n{table}"
    )
