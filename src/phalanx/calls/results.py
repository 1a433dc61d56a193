"""What comes back of one call, by position in its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import RankOutcome, Ref, Ticket
from phalanx.wire.value import Value


class Results:
    """The references to the outputs of ranks that were called one by one."""

    __slots__ = ("_tickets", "_transport", "_values")

    def __init__(self, transport: Backend, tickets: Sequence[Ticket]) -> None:
        self._transport = transport
        self._tickets = tickets
        self._values = [ticket.value for ticket in tickets]

    def __len__(self) -> int:
        return len(self._tickets)

    def fetch(self, timeout: float | None) -> list[Any]:
        """Return the outputs of all ranks.

        Raises:
            FetchFailed: one of them cannot be had; as soon as that is known.
            NotReady: time is up.
        """
        return self._transport.fetch(self._values, timeout)

    def fetched_with_others(self) -> Sequence[Ref] | None:
        """Return what outputs can be fetched by, together with those of other calls; None where they cannot."""
        return self._values

    def awaited(self) -> Sequence[Ref]:
        """Return what a wait waits for: all of these have ended once all ranks have, or one has failed."""
        return self._values

    def all_ended(self) -> bool:
        """Return whether all ranks have ended; does not wait."""
        return not self._transport.wait(self._values, len(self._values), 0)[1]

    def output(self, position: int) -> Value:
        """Return the output of an ended rank.

        Raises:
            FetchFailed: it cannot be had.
        """
        return self._transport.fetch([self._values[position]])[0]

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        """Return those positions that have ended (at least ``count``, unless time runs out), and the rest."""
        ended, rest = self._transport.wait([self._values[p] for p in positions], count, timeout)
        return [positions[index] for index in ended], [positions[index] for index in rest]

    def outcome(self, position: int) -> RankOutcome:
        """Return how an ended rank's part ended."""
        return self._transport.outcome(self._values[position])

    def reference(self, position: int) -> Ticket:
        """Return what stands for a rank's output, there or not, when it is handed on."""
        return self._tickets[position]

    def disregard(self) -> None:
        """Note that the call is over, and that nobody will ask for what its ranks give back; does not wait."""
        self._transport.disregard([ref for ticket in self._tickets for ref in ticket if ref is not None])

    def leave(self) -> None:
        """Note that the call was cancelled, so that nobody reads what its ranks give back; does not wait."""
