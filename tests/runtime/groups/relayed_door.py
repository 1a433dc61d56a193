"""A door through others: calls go to relays, each of which has some ranks below it. All in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.runtime.calls.door import Arrivals, DirectDoor, Outgoing
from phalanx.runtime.life.epoch import Epoch
from phalanx.transport.base import Outcome, Ticket, Transport
from phalanx.wire.messages import Message


@dataclass
class Relay:
    """Sends what it is given to the ranks below it, and gives back what came of them together."""

    transport: Transport
    hops: int = 0

    def send(
        self, epoch: Epoch, call: Outgoing, ranks: Sequence[int], messages: Sequence[Message]
    ) -> Arrivals:
        self.hops += 1
        below = Outgoing(call.role, call.method, ranks, messages, call.returns)
        return DirectDoor(self.transport).submit(epoch, below)


@dataclass
class RelayedArrivals:
    """What relays give back, by position in the call."""

    parts: list[Arrivals]
    width: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def _of(self, position: int) -> tuple[Arrivals, int]:
        return self.parts[position // self.width], position % self.width

    def fetch(self, timeout: float | None) -> list[Any]:
        return [output for part in self.parts for output in part.fetch(timeout)]

    def output(self, position: int) -> Any:
        part, at = self._of(position)
        return part.output(at)

    def outcome(self, position: int) -> Outcome:
        part, at = self._of(position)
        return part.outcome(at)

    def fetched_with_others(self) -> None:
        return None

    def disregard(self) -> None:
        for part in self.parts:
            part.disregard()

    def leave(self) -> None:
        for part in self.parts:
            part.leave()

    def reference(self, position: int) -> Ticket:
        part, at = self._of(position)
        return part.reference(at)

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        """As all relays are in one process, one of them is waited for after the other."""
        ended: list[int] = []
        for index, part in enumerate(self.parts):
            here = [p - index * self.width for p in positions if p // self.width == index]
            if here:
                wanted = max(0, min(len(here), count - len(ended)))
                done, _ = part.wait(here, wanted or 1, timeout if wanted else 0)
                ended += [index * self.width + position for position in done]
        return ended, [position for position in positions if position not in ended]


@dataclass
class RelayedDoor:
    """Two ranks below each relay; equal messages travel to a relay once."""

    transport: Transport
    width: int = 2
    relays: dict[int, Relay] = field(default_factory=dict[int, Relay])

    def submit(self, epoch: Epoch, call: Outgoing) -> Arrivals:
        parts: list[Arrivals] = []
        for index, ranks, messages in self._batches(call):
            relay = self.relays.setdefault(index, Relay(self.transport))
            parts.append(relay.send(epoch, call, ranks, messages))
            call.reached += len(ranks)
            call.nbytes += sum(len(data) for data in {id(m): m.data for m in messages}.values())
        return RelayedArrivals(parts, self.width)

    def _batches(self, call: Outgoing) -> Iterator[tuple[int, Sequence[int], Sequence[Message]]]:
        made = iter(zip(call.ranks, call.messages, strict=True))
        index = 0
        while batch := [pair for _, pair in zip(range(self.width), made, strict=False)]:
            yield index, [rank for rank, _ in batch], [message for _, message in batch]
            index += 1
