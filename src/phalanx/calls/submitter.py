"""The one way by which calls reach ranks, and their outputs come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import RankOutcome, RankStream, Ref, Ticket
from phalanx.calls.streams import PendingStream, Streaming
from phalanx.group.epoch import Epoch
from phalanx.wire.messages import OUTPUT, Message
from phalanx.wire.value import Value


@dataclass
class Outgoing:
    """One call on its way out: its messages by rank, made when they are asked for. Equal ones are the same object.

    ``returns`` is how many objects each rank gives back; ``streaming`` says of which ranks items are wanted one by one.
    ``reached`` are the positions of the ranks that have been sent theirs, ``nbytes`` the bytes of these messages.
    """

    role: str
    method: str
    ranks: Sequence[int]
    messages: Iterable[Message]
    returns: int = OUTPUT
    reached: Sequence[int] = ()
    nbytes: int = 0
    streaming: Streaming | None = None


class PendingResults(Protocol):
    """What comes back of one call, by position in its ranks."""

    def __len__(self) -> int: ...

    def fetch(self, timeout: float | None) -> list[Any]:
        """The outputs of all ranks. Raises FetchFailed as soon as one cannot be had, NotReady at the timeout."""
        ...

    def fetched_with_others(self) -> Sequence[Ref] | None:
        """What the outputs can be fetched by, together with those of other calls; None where they cannot."""
        ...

    def awaited(self) -> Sequence[Ref]:
        """What a wait for its end waits for: all of these have ended once all ranks have, or one has failed."""
        ...

    def all_ended(self) -> bool:
        """Whether all ranks have ended; does not wait."""
        ...

    def output(self, position: int) -> Value:
        """The output of an ended rank. Raises FetchFailed."""
        ...

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        """Of some positions those that have ended (at least ``count``, unless time runs out), and the rest."""
        ...

    def outcome(self, position: int) -> RankOutcome:
        """How an ended rank's part ended."""
        ...

    def reference(self, position: int) -> Ticket:
        """What stands for a rank's output, there or not, when it is handed on."""
        ...

    def disregard(self) -> None:
        """Note that the call is over, and that nobody will ask for what its ranks give back; does not wait."""
        ...

    def leave(self) -> None:
        """Note that the call was cancelled, so that nobody reads what its ranks give back; does not wait."""
        ...


class Submitter(Protocol):
    """Takes a call, not a rank: how its messages get to the ranks is its own affair."""

    def submit(self, epoch: Epoch, call: Outgoing) -> PendingResults:
        """Send a call to ranks of an epoch; does not wait for it. What making a message raises is raised."""
        ...


class DirectArrivals:
    """The tickets of ranks that were called one by one."""

    __slots__ = ("_tickets", "_transport", "_values")

    def __init__(self, transport: Backend, tickets: Sequence[Ticket]) -> None:
        self._transport = transport
        self._tickets = tickets
        self._values = [ticket.value for ticket in tickets]

    def __len__(self) -> int:
        return len(self._tickets)

    def fetch(self, timeout: float | None) -> list[Any]:
        return self._transport.fetch(self._values, timeout)

    def fetched_with_others(self) -> Sequence[Ref] | None:
        return self._values

    def awaited(self) -> Sequence[Ref]:
        return self._values

    def all_ended(self) -> bool:
        return not self._transport.wait(self._values, len(self._values), 0)[1]

    def output(self, position: int) -> Value:
        return self._transport.fetch([self._values[position]])[0]

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        ended, rest = self._transport.wait([self._values[p] for p in positions], count, timeout)
        return [positions[index] for index in ended], [positions[index] for index in rest]

    def outcome(self, position: int) -> RankOutcome:
        return self._transport.outcome(self._values[position])

    def reference(self, position: int) -> Ticket:
        return self._tickets[position]

    def leave(self) -> None:
        """Nothing waits for a reader."""

    def disregard(self) -> None:
        self._transport.disregard([ref for ticket in self._tickets for ref in ticket if ref is not None])


class DirectSubmitter:
    """Sends a call to each of its ranks separately."""

    def __init__(self, transport: Backend) -> None:
        self._transport = transport

    def submit(self, epoch: Epoch, call: Outgoing) -> PendingResults:
        if call.streaming is not None:
            return self._streams(epoch, call, call.streaming)
        submit, endpoints = self._transport.submit, epoch.endpoints
        role, method, returns = call.role, call.method, call.returns
        tickets: list[Ticket] = []
        nbytes = 0
        try:
            for rank, (data, refs) in zip(call.ranks, call.messages, strict=True):
                tickets.append(submit(endpoints[rank], role, method, data, refs, returns))
                nbytes += len(data)
        finally:
            call.reached, call.nbytes = range(len(tickets)), nbytes
        return DirectArrivals(self._transport, tickets)

    def _streams(self, epoch: Epoch, call: Outgoing, streaming: Streaming) -> PendingResults:
        transport, role, method = self._transport, call.role, call.method
        parts: list[Ticket | RankStream] = []
        try:
            for position, (rank, (data, refs)) in enumerate(zip(call.ranks, call.messages, strict=True)):
                endpoint = epoch.endpoints[rank]
                if position in streaming.positions:
                    parts.append(transport.stream(endpoint, role, method, data, refs, streaming.buffer))
                else:
                    parts.append(transport.submit(endpoint, role, method, data, refs))
                call.nbytes += len(data)
        finally:
            call.reached = range(len(parts))
        return PendingStream(self._transport, parts, streaming)
