"""The door of large groups with relays in this process, for backends whose calls have ended when they were sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.runtime.calls.relayed_door import RelayedDoor
from phalanx.topology.relays import RelayTree
from phalanx.transport.base import Transport
from phalanx.transport.inline_values import InlineRef
from phalanx.transport.relaying import Part
from phalanx.transport.values import Endpoint, Lost, Ref, Ticket
from phalanx.wire.arrival import decoding
from phalanx.wire.outputs import HALVED
from phalanx.wire.relayed import (
    Batch,
    Envelope,
    Gone,
    Shares,
    batch_of,
    merged,
    packed_output,
    part_of,
    unpacked_outputs,
)


@dataclass
class LocalRelays:
    """Relays as calls of functions; ``lost`` are those that do not answer any more."""

    transport: Transport
    tree: RelayTree
    endpoints: Sequence[Endpoint]
    hops: int = 0
    lost: set[int] = field(default_factory=set[int])
    kept: dict[tuple[int, int], list[Ticket]] = field(default_factory=dict[tuple[int, int], list[Ticket]])
    forgotten: int = 0  # messages that said so
    passed: list[int] = field(default_factory=list[int])  # references, by message to a relay

    def send(self, head: int, envelope: Envelope, refs: Sequence[Ref]) -> Ref:
        if head in self.lost:
            return InlineRef(lost=Lost("it was ended"))
        self._forget(head, envelope.over)
        tickets = self._forward(self.tree.head_indices[head], envelope.pack(), refs)
        self.kept[head, envelope.serial] = tickets
        values = [ticket.value for ticket in tickets]
        if envelope.returns == HALVED:
            values += [ticket.rest for ticket in tickets]
        failed = next((ref for ref in values if not self.transport.outcome(ref).ok), None)
        return failed if failed is not None else self.transport.put(self._batch(values))

    def _batch(self, values: Sequence[Ref]) -> Batch:
        with decoding(kept_encoded=True):
            outputs = [packed_output(output) for output in self.transport.fetch(values)]
        return merged(
            len(values),
            [([place], batch_of([output], [values[place]])) for place, output in enumerate(outputs)],
        )

    def _forward(self, index: int, data: bytes, refs: Sequence[Ref]) -> list[Ticket]:
        self.hops += 1
        self.passed.append(len(refs))
        relay, envelope = self.tree.relays[index], Envelope.unpack(data)
        ranks = relay.ranks if envelope.ranks is None else envelope.ranks
        if not relay.below:
            return [self._to_rank(envelope, at, rank, refs) for at, rank in enumerate(ranks)]
        tickets: list[Any] = [None] * len(ranks)
        shares = Shares([self.tree.relays[below].ranks for below in relay.below])
        for child, positions, some in shares.of(envelope.ranks):
            part, used = part_of(envelope, positions, some)
            below = self._forward(relay.below[child], part.pack(), [refs[place] for place in used])
            for position, ticket in zip(positions, below, strict=True):
                tickets[position] = ticket
        return tickets

    def _to_rank(self, envelope: Envelope, at: int, rank: int, refs: Sequence[Ref]) -> Ticket:
        data, places = envelope.messages[envelope.which[at] if envelope.which else 0]
        own = [refs[place] for place in places]
        endpoint = self.endpoints[rank]
        if envelope.bare:
            endpoint.bare_calls = envelope.bare[at]
        return self.transport.submit(endpoint, envelope.role, envelope.method, data, own, envelope.returns)

    def forget(self, head: int, serials: Sequence[int]) -> None:
        self.forgotten += 1
        self._forget(head, serials)

    def _forget(self, head: int, serials: Sequence[int]) -> None:
        for serial in serials:
            self.kept.pop((head, serial), None)

    def batches(self, refs: Sequence[Ref], timeout: float | None) -> list[Batch]:
        return self.transport.fetch(refs, timeout)

    def outputs(self, batches: Sequence[Batch], timeout: float | None) -> list[list[Any]]:
        return [unpacked_outputs(batch, self.transport.fetch(batch.refs, timeout)) for batch in batches]

    def parts(self, head: int, serial: int, count: int, timeout: float) -> list[Part]:
        if head in self.lost:
            return [Part(None, True, Gone(f"relay {head}", "it was ended"))] * count
        return [Part(ticket, ended=True) for ticket in self.kept[head, serial]]

    def after(self, calls: Sequence[tuple[int, int]]) -> None:
        """All calls have ended when they were sent."""

    def gone(self, head: int | None = None) -> Gone | None:
        lost = self.lost if head is None else self.lost & {head}
        return Gone(f"relay {min(lost)}", "it was ended") if lost else None

    def whereabouts(self) -> list[tuple[str, int, str, int]]:
        return []

    def end(self) -> None:
        self.kept.clear()


@dataclass
class LocalRelaying:
    """Makes relays in this process, and keeps them to be looked at."""

    transport: Transport
    made: list[LocalRelays] = field(default_factory=list[LocalRelays])

    def relays(self, tree: RelayTree, endpoints: Sequence[Endpoint]) -> LocalRelays:
        self.made.append(LocalRelays(self.transport, tree, endpoints))
        return self.made[-1]


def local_door(transport: Transport) -> RelayedDoor:
    """A door through relays of this process, with two below each."""
    return door_with(transport, LocalRelaying(transport))


def door_with(
    transport: Transport, relaying: LocalRelaying, lost: Callable[[], None] = lambda: None
) -> RelayedDoor:
    """The same, to relays that are looked at."""
    return RelayedDoor(
        transport, relaying, lambda: True, lost, turn=threading.RLock(), ordered=True, fan_out=2, heads=2
    )
