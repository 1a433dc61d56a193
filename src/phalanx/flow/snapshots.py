"""Values that tell of a channel at one moment: its leases, a row of a table, and what is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.flow.channel_messages import Loss
from phalanx.flow.items import Cut, Part
from phalanx.flow.ledger import LedgerState

By = Literal["items", "bytes"]


@dataclass(frozen=True)
class Lease:
    """What a consumer has taken and not yet acknowledged."""

    number: int
    consumer: str
    parts: tuple[Part, ...]
    at: float

    @property
    def cuts(self) -> list[Cut]:
        return [part.cut for part in self.parts]


@dataclass(frozen=True)
class Depth:
    """A row of a table about the channel; ages in seconds, rates per second over the last ten."""

    waiting: int
    waiting_rows: int
    waiting_bytes: int
    taken: int
    leases: int
    puts: int
    """Producers that wait for room."""
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
class ChannelState:
    """All that a channel is, without requests and leases: what was taken waits again.

    Payloads in it are what the producers gave: the link replaces them by values (`Moved`) before it saves them.
    """

    maxsize: int | None
    by: By
    ledger: LedgerState
    next_lease: int
    losses: tuple[Loss, ...]
    reasons: dict[str, int]
    ended: str | None
    closed: bool
