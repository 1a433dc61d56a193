"""Values that tell of a channel at one moment: its leases, a row of a table, and what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.channels.channel_items import Cut, Part
from phalanx.channels.channel_messages import Loss
from phalanx.channels.item_accounting import Ledger, LedgerState
from phalanx.channels.rates import Rates
from phalanx.channels.waiting_requests import Requests

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

    @classmethod
    def of(
        cls, ledger: Ledger, leases: Sequence[Lease], requests: Requests, rates: Rates, now: float
    ) -> Depth:
        """The channel that has these, at that time."""
        oldest, (oldest_put, oldest_take) = ledger.oldest, requests.ages(now)
        return cls(
            waiting=len(ledger),
            waiting_rows=ledger.waiting_rows,
            waiting_bytes=ledger.waiting_bytes,
            taken=sum(len(lease.parts) for lease in leases),
            leases=len(leases),
            puts=len(requests.puts),
            takes=len(requests.takes),
            oldest_item=now - oldest.at if oldest else 0.0,
            oldest_put=oldest_put,
            oldest_take=oldest_take,
            oldest_lease=max((now - lease.at for lease in leases), default=0.0),
            accepted_per_second=rates.accepted.per_second(now),
            delivered_per_second=rates.delivered.per_second(now),
            delivered_bytes_per_second=rates.delivered_bytes.per_second(now),
        )


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
