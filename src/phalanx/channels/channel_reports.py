"""Texts, tables and registry records about channels."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from phalanx.channels.channel_state import ChannelStatus, Loss
from phalanx.channels.staleness_state import display_name
from phalanx.display.byte_format import size
from phalanx.display.registry_records import ChannelEntry
from phalanx.display.tables import Table
from phalanx.errors import ItemsLost
from phalanx.session.session import session


def limit_text(maxsize: int | None, by: str) -> str:
    """Return the bound of a channel as text."""
    if maxsize is None:
        return "any number of items"
    return size(maxsize) if by == "bytes" else f"{maxsize} item{'s' if maxsize > 1 else ''}"


def losses_text(losses: Iterable[Loss]) -> str:
    """Return the losses as text, by process."""
    return "; ".join(f"{_counts_text(loss)} of {display_name(loss.holder)}: {loss.why}" for loss in losses)


def _counts_text(loss: Loss) -> str:
    counts = ((loss.items, "item"), (loss.rows, "row"), (loss.puts, "waiting put"))
    return ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts if count)


def lost_items(channel: str, losses: Sequence[Loss]) -> ItemsLost:
    """Return the error that names the lost items and the processes that stored them."""
    error = ItemsLost(
        f"channel {channel!r}: items were lost with the process that stored their bytes: "
        f"{losses_text(losses) or 'part of this batch'}. Other items can be taken; to keep items longer than the "
        "process that put them, drain the channel before that process is closed, or create it with handoff=True",
        channel=channel,
    )
    error.losses = tuple(losses)
    return error


def channel_table(name: str, limit: str, status: ChannelStatus) -> Table:
    """Return the table that ``Channel.explain()`` shows."""
    depth, items, rows = status.depth, status.items, status.rows
    waiting = f"{depth.waiting_rows} rows, {size(depth.waiting_bytes)}"
    accepted = f"{rows.submitted} rows, {depth.accepted_per_second:.1f} items/s"
    speed = f"{depth.delivered_per_second:.1f} items/s, {size(depth.delivered_bytes_per_second)}/s"
    dropped = ", ".join(f"{count} {reason}" for reason, count in status.reasons.items())
    lines = (
        ("waiting", depth.waiting, waiting, depth.oldest_item),
        ("taken, not acknowledged", items.taken, f"{depth.leases} leases", depth.oldest_lease),
        ("puts that wait for room", depth.puts, "", depth.oldest_put),
        ("takes that wait for items", depth.takes, "", depth.oldest_take),
        ("put so far", items.submitted, accepted, 0.0),
        ("delivered", items.delivered, f"{rows.delivered} rows, {speed}", 0.0),
        ("dropped by request", items.dropped, dropped, 0.0),
        ("lost with a process", items.lost, f"{rows.lost} rows", 0.0),
    )
    table = tuple((title, count, more, f"{age:.1f} s" if age else "") for title, count, more, age in lines)
    notes = tuple(f"{display_name(peer)}: {leases} open leases" for peer, leases in status.consumers.items())
    return Table(f"channel {name}: {limit} may wait", ("what", "items", "more", "oldest"), table, notes)


def channel_entry(name: str, limit: str, status: ChannelStatus) -> ChannelEntry:
    """Return the registry record of a channel."""
    depth, items = status.depth, status.items
    now = time.time()
    return ChannelEntry(
        run=session.run_id,
        name=name,
        limit=limit,
        waiting=depth.waiting,
        waiting_bytes=depth.waiting_bytes,
        taken=items.taken,
        puts=depth.puts,
        takes=depth.takes,
        delivered=items.delivered,
        dropped=items.dropped,
        lost=items.lost,
        per_second=round(depth.delivered_per_second, 1),
        changed=now,
        oldest=round(now - depth.oldest_item, 1) if depth.waiting else None,
    )
