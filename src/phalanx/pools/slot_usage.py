"""Which groups are on which slots of a pool."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.display.tables import Table
from phalanx.errors import PlacementError
from phalanx.pools.slot_reservation import SlotReservation, Tenant, accelerator_text
from phalanx.topology.slots import Slot, SlotView

books = threading.Lock()
"""Held while somebody writes them: groups may be started by several threads."""


def book(holdings: Mapping[str, SlotReservation], slots: Sequence[Slot], group: Tenant) -> None:
    """Book one share of each of these slots for a group, unless it has one.

    Raises:
        PlacementError: one of them has no share left; nothing was booked.
    """
    with books:
        slots = [slot for slot in slots if group not in holdings[slot.pool].groups.get(slot, ())]
        for slot in slots:
            holding = holdings[slot.pool]
            on_it = holding.groups.get(slot, [])
            if len(on_it) >= holding.max_colocate_count:
                raise PlacementError(
                    f"group {group.name!r} does not fit on {slot}: it holds {len(on_it)} of "
                    f"max_colocate_count={holding.max_colocate_count} groups already "
                    f"({', '.join(g.name for g in on_it)}); close one of them, or make the pool with a larger "
                    "max_colocate_count"
                )
        for slot in slots:
            holdings[slot.pool].groups.setdefault(slot, []).append(group)


def unbook(holdings: Mapping[str, SlotReservation], slots: Sequence[Slot], group: Tenant) -> None:
    """Take a group off these slots, as far as it is on them."""
    with books:
        for slot in slots:
            on_it = holdings[slot.pool].groups.get(slot, [])
            if group in on_it:
                on_it.remove(group)


def explain_slots(
    pool: str, view: SlotView, holdings: Mapping[str, SlotReservation], nodes: Sequence[str]
) -> Table:
    """Which slot lies where, ``nodes`` by rank where they are known, and which groups are on it."""
    rows: list[tuple[Any, ...]] = []
    for rank, slot in enumerate(view.slots):
        holding = holdings[slot.pool]
        known = holding.facts.get(slot)
        groups = [group.name for group in holding.groups.get(slot, ())]
        node = nodes[rank][:8] if nodes else ""
        where = (known.host if known else None, node or None, accelerator_text(holding, slot))
        used = f"{len(groups)} of {holding.max_colocate_count}"
        rows.append((rank, slot.pool, slot.block, view.local_ranks[rank], *where, used, groups))
    columns = ("rank", "pool", "block", "local rank", "host", "node", "accelerator", "shares used", "groups")
    return Table(f"pool {pool}: {view.world_size} slots", columns, tuple(rows))
