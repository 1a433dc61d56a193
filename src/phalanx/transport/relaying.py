"""What a backend provides that can send calls through relays: processes between a driver and the ranks of its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from phalanx.topology.relays import RelayTree
from phalanx.transport.values import Endpoint, RankStream, Ref, Ticket
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.relayed import Batch, Envelope, Gone


@dataclass(frozen=True)
class Part:
    """What is known of one rank's part of a call: its ticket and whether it had ended; or who took it along."""

    ticket: Ticket | None
    ended: bool = False
    gone: Gone | None = None


class Sender(Protocol):
    """Sends one call to one rank, as a transport does."""

    def submit(
        self,
        endpoint: Endpoint,
        role: str,
        method: str,
        data: bytes,
        refs: Sequence[Ref],
        returns: int = OUTPUT,
    ) -> Ticket: ...

    def stream(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], buffer: int | None
    ) -> RankStream: ...


class Relays(Protocol):
    """The relays of one roster, as a tree; calls to a head reach its ranks in the order in which they were sent."""

    tree: RelayTree

    def send(self, head: int, envelope: Envelope, refs: Sequence[Ref]) -> Ref:
        """Send a call to ranks of one head, by its place among the heads; gives what its batch is fetched by.

        That fails as soon as a rank failed. The calls that the envelope says are over are forgotten with it.
        """
        ...

    def forget(self, head: int, serials: Sequence[int]) -> None:
        """Say that nobody will ask for these calls any more; does not wait."""
        ...

    def batches(self, refs: Sequence[Ref], timeout: float | None) -> list[Batch]:
        """Raises FetchFailed as soon as one cannot be had, NotReady at the timeout."""
        ...

    def outputs(self, batches: Sequence[Batch], timeout: float | None) -> list[list[Any]]:
        """The outputs of each batch by rank. Raises FetchFailed where one cannot be had, NotReady at the timeout."""
        ...

    def parts(self, head: int, serial: int, count: int, timeout: float) -> list[Part]:
        """What is known of a call's part on each of the head's ``count`` ranks that it went to."""
        ...

    def after(self, calls: Sequence[tuple[int, int]]) -> Sender | None:
        """What calls ranks directly so that each begins once these calls, by head and serial, have ended on all ranks
        of its head, whatever came of them; does not wait. None where that cannot be had."""
        ...

    def gone(self, head: int | None = None) -> Gone | None:
        """A relay that is known to have ended, of those under a head or of all; cheap."""
        ...

    def whereabouts(self) -> list[tuple[str, int, str, int]]:
        """For each relay what it is called, how many ranks it reaches, its host and its process id."""
        ...

    def end(self) -> None:
        """End the processes. Idempotent."""
        ...


@runtime_checkable
class Relaying(Protocol):
    """A backend that has relays.

    ``relay_from`` is from how many ranks on its groups have some; None: as ``PHALANX_RELAY_FROM`` says.
    """

    relay_from: int | None

    def relays(self, tree: RelayTree, endpoints: Sequence[Endpoint]) -> Relays:
        """Start the relays of a tree over these ranks; does not wait for them, but where there are hundreds."""
        ...
