"""Counts, rates and tables of a channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phalanx.display.byte_format import size
from phalanx.display.tables import Table

_WINDOW_S = 10


def per_second(counts: Counter[int], began: float, now: float) -> float:
    """Return the mean rate of the last ten seconds, and forget older seconds. ``counts`` are events by second."""
    for second in [second for second in counts if second <= int(now) - _WINDOW_S]:
        del counts[second]
    return counts.total() / min(max(now - began, 1.0), _WINDOW_S)


@dataclass(frozen=True)
class ItemCounts:
    """Counts of all items or rows: submitted = delivered + dropped + lost + waiting + taken."""

    submitted: int = 0
    delivered: int = 0
    dropped: int = 0
    lost: int = 0
    waiting: int = 0
    taken: int = 0

    @property
    def is_balanced(self) -> bool:
        """True if the count equation is satisfied."""
        return self.submitted == self.delivered + self.dropped + self.lost + self.waiting + self.taken


@dataclass
class Loss:
    """Items, rows and waiting puts that were lost with the process ``holder``."""

    holder: str
    why: str
    items: int = 0
    rows: int = 0
    puts: int = 0


@dataclass(frozen=True)
class Depth:
    """Fill level of a channel. Ages are in seconds, rates per second over the last ten seconds."""

    waiting: int
    waiting_rows: int
    waiting_bytes: int
    taken: int
    leases: int
    puts: int
    """Producers that wait for capacity."""
    takes: int
    """Consumers that wait for items."""
    oldest_item: float
    oldest_put: float
    oldest_take: float
    oldest_lease: float
    accepted_per_second: float
    delivered_per_second: float
    delivered_bytes_per_second: float


@dataclass(frozen=True)
class ChannelStatus:
    """Depth, counts and consumers of a channel."""

    depth: Depth
    items: ItemCounts
    rows: ItemCounts
    reasons: Mapping[str, int]
    consumers: Mapping[str, int]
    """Open leases by consumer."""
    leaving: tuple[str, ...]
    """Producers that end and wait until their items are delivered."""


def display_name(peer: str) -> str:
    """Return the name of a peer without its serial number."""
    return peer.rpartition("#")[0] or peer


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


def channel_table(name: str, limit: str, status: ChannelStatus) -> Table:
    """Return the table that ``Channel.explain()`` shows."""
    depth, items, rows = status.depth, status.items, status.rows
    speed = f"{depth.delivered_per_second:.1f} items/s, {size(depth.delivered_bytes_per_second)}/s"
    dropped = ", ".join(f"{count} {reason}" for reason, count in status.reasons.items())
    lines = (
        (
            "waiting",
            depth.waiting,
            f"{depth.waiting_rows} rows, {size(depth.waiting_bytes)}",
            depth.oldest_item,
        ),
        ("taken, not acknowledged", items.taken, f"{depth.leases} leases", depth.oldest_lease),
        ("puts that wait for room", depth.puts, "", depth.oldest_put),
        ("takes that wait for items", depth.takes, "", depth.oldest_take),
        (
            "put so far",
            items.submitted,
            f"{rows.submitted} rows, {depth.accepted_per_second:.1f} items/s",
            0.0,
        ),
        ("delivered", items.delivered, f"{rows.delivered} rows, {speed}", 0.0),
        ("dropped by request", items.dropped, dropped, 0.0),
        ("lost with a process", items.lost, f"{rows.lost} rows", 0.0),
    )
    table = tuple((title, count, more, f"{age:.1f} s" if age else "") for title, count, more, age in lines)
    notes = tuple(f"{display_name(peer)}: {leases} open leases" for peer, leases in status.consumers.items())
    return Table(f"channel {name}: {limit} may wait", ("what", "items", "more", "oldest"), table, notes)
