"""A channel as a table for people."""

from __future__ import annotations

from phalanx.channels.channel_server import Look
from phalanx.channels.services import shown
from phalanx.display.byte_format import size
from phalanx.display.tables import Table


def limit_of(maxsize: int | None, by: str) -> str:
    """How much may wait, in words."""
    if maxsize is None:
        return "any number of items"
    return size(maxsize) if by == "bytes" else f"{maxsize} item{'s' if maxsize > 1 else ''}"


def channel_table(name: str, limit: str, look: Look) -> Table:
    """What waits, who waits, how old, how fast."""
    depth, items, rows = look.depth, look.items, look.rows
    waiting = f"{depth.waiting_rows} rows, {size(depth.waiting_bytes)}"
    put = f"{rows.submitted} rows, {depth.accepted_per_second:.1f} items/s"
    speed = f"{depth.delivered_per_second:.1f} items/s, {size(depth.delivered_bytes_per_second)}/s"
    delivered = f"{rows.delivered} rows, {speed}"
    dropped = ", ".join(f"{count} {reason}" for reason, count in look.reasons.items())
    told = (
        ("waiting", depth.waiting, waiting, depth.oldest_item),
        ("taken, not acknowledged", items.taken, f"{depth.leases} leases", depth.oldest_lease),
        ("puts that wait for room", depth.puts, "", depth.oldest_put),
        ("takes that wait for items", depth.takes, "", depth.oldest_take),
        ("put so far", items.submitted, put, None),
        ("delivered", items.delivered, delivered, None),
        ("dropped by request", items.dropped, dropped, None),
        ("lost with a process", items.lost, f"{rows.lost} rows", None),
    )
    table = tuple((what, count, more, f"{age:.1f} s" if age else "") for what, count, more, age in told)
    notes = tuple(f"{shown(consumer)}: {leases} open leases" for consumer, leases in look.consumers)
    return Table(f"channel {name}: {limit} may wait", ("what", "items", "more", "oldest"), table, notes)
