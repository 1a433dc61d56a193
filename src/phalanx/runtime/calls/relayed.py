"""What comes back of a call that went through relays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.runtime.calls.door import DirectArrivals
from phalanx.transport.base import Transport
from phalanx.transport.relaying import Part, Relays
from phalanx.transport.values import FetchFailed, Lost, Outcome, Ref, Ticket
from phalanx.wire.outputs import with_rests
from phalanx.wire.relayed import Batch, Gone
from phalanx.wire.value import Value

_PARTS_WITHIN_S = 60.0
"""A relay that is gone is told at once; one that is busy, on a node that has too much to do, is not gone."""
_OBJECT_LOST = "object lost"


@dataclass(frozen=True)
class Sent:
    """What one head was sent of a call: the positions of its ranks, and what their batch is fetched by."""

    head: int
    positions: Sequence[int]
    ref: Ref


class RelayedArrivals:
    """The batches of the heads that a call was sent to.

    Where that does not do, since ranks failed or are late, are wanted one by one, or are handed on, the relays are
    asked for the tickets of the ranks; from then on these are looked at as if they had been called one by one.
    """

    def __init__(
        self,
        transport: Transport,
        relays: Relays,
        serial: int,
        count: int,
        sent: Sequence[Sent],
        *,
        halved: bool,
        over: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._transport = transport
        self._relays = relays
        self._serial = serial
        self._count = count
        self._sent = sent
        self._halved = halved
        self._over = over
        self._returned = False
        self._direct: DirectArrivals | None = None
        self._gone: dict[int, Gone] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def returned(self) -> bool:
        """Whether it is known that all ranks returned."""
        return self._returned

    @property
    def sent_as(self) -> list[tuple[int, int]]:
        """By which heads it went, and its serial there."""
        return [(part.head, self._serial) for part in self._sent]

    def __del__(self) -> None:
        self._over(self._serial, [part.head for part in self._sent])

    def fetch(self, timeout: float | None) -> list[Any]:
        if self._direct is not None:
            if self._gone:
                raise FetchFailed
            return self._direct.fetch(timeout)
        limit = None if timeout is None else self._transport.now() + timeout
        batches = self._relays.batches([part.ref for part in self._sent], timeout)
        left = None if limit is None else max(0.0, limit - self._transport.now())
        outputs = self._in_order(batches, self._relays.outputs(batches, left))
        self._returned = True
        return outputs

    def _in_order(self, batches: Sequence[Batch], outputs: Sequence[list[Any]]) -> list[Any]:
        values: list[Any] = [None] * self._count
        rests: list[Any] = [None] * self._count if self._halved else []
        for part, some in zip(self._sent, outputs, strict=True):
            count = len(part.positions)
            positions = part.positions
            if isinstance(positions, range) and positions.step == 1:
                values[positions.start : positions.stop] = some[:count]
                if self._halved:
                    rests[positions.start : positions.stop] = some[count:]
                continue
            for at, position in enumerate(positions):
                values[position] = some[at]
                if self._halved:
                    rests[position] = some[count + at]
        return with_rests(values, rests)

    def fetched_with_others(self) -> None:
        return None

    def awaited(self) -> Sequence[Ref]:
        return [part.ref for part in self._sent]

    def all_ended(self) -> bool:
        if self._returned:
            return True
        refs = self.awaited()
        if self._transport.wait(refs, len(refs), 0)[1]:
            return False
        if all(self._transport.outcome(ref).ok for ref in refs):
            self._returned = True
            return True
        return not self.wait(range(self._count), self._count, 0)[1]

    def output(self, position: int) -> Value:
        arrivals = self._by_rank()
        if position in self._gone:
            raise FetchFailed
        return arrivals.output(position)

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        if self._direct is None:
            limit = None if timeout is None else self._transport.now() + timeout
            if count >= self._count and timeout != 0:
                refs = self.awaited()
                self._transport.wait(refs, len(refs), timeout)
            if not self._returned and not self._transport.wait(self.awaited(), len(self._sent), 0)[1]:
                self._returned = all(self._transport.outcome(ref).ok for ref in self.awaited())
            if self._returned:
                return list(positions), []
            timeout = None if limit is None else max(0.0, limit - self._transport.now())
        arrivals = self._by_rank()
        gone = [position for position in positions if position in self._gone]
        others = [position for position in positions if position not in self._gone]
        if not others:
            return gone, []
        wanted = min(len(others), max(1, count - len(gone)))
        ended, rest = arrivals.wait(others, wanted, 0 if len(gone) >= count else timeout)
        return sorted([*gone, *ended]), rest

    def outcome(self, position: int) -> Outcome:
        arrivals = self._by_rank()
        gone = self._gone.get(position)
        if gone is not None:
            return Outcome(lost=lost_with(gone))
        outcome = arrivals.outcome(position)
        if outcome.lost is not None and outcome.lost.exit == _OBJECT_LOST:
            head = next(part.head for part in self._sent if position in part.positions)
            gone = self._relays.gone(head)
            if gone is not None:
                return replace(outcome, lost=lost_with(gone))
        return outcome

    def reference(self, position: int) -> Ticket:
        arrivals = self._by_rank()
        if position in self._gone:  # whoever fetches it learns that its relay is gone
            return Ticket(next(part.ref for part in self._sent if position in part.positions))
        return arrivals.reference(position)

    def disregard(self) -> None:
        self._transport.disregard(self.awaited())
        if self._direct is not None and not self._gone:
            self._direct.disregard()

    def leave(self) -> None:
        """Nothing waits for a reader."""

    def _by_rank(self) -> DirectArrivals:
        with self._lock:
            if self._direct is None:
                self._direct = self._asked()
            return self._direct

    def _asked(self) -> DirectArrivals:
        tickets: list[Ticket] = [Ticket(None)] * self._count
        for sent in self._sent:
            parts: Sequence[Part] = self._relays.parts(
                sent.head, self._serial, len(sent.positions), _PARTS_WITHIN_S
            )
            for position, part in zip(sent.positions, parts, strict=True):
                if part.ticket is None:
                    self._gone[position] = part.gone or Gone("a relay", "it does not answer")
                else:
                    tickets[position] = part.ticket
        return DirectArrivals(self._transport, tickets, halved=self._halved)


def lost_with(gone: Gone) -> Lost:
    """What is known of a rank's part whose relay is gone: the rank itself may run."""
    return Lost(
        f"its output is lost with a process between it and the driver, {gone.relay}: {gone.why}. The rank itself may "
        "run",
        exit="relay lost",
        hint="restart() the group; PHALANX_RELAY_FROM=0 has its calls go to each rank directly",
        relay=gone.relay,
    )
