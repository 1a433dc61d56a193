"""Interface of backends, as five contracts: placing, calling, storing, watching, noticing.

Modules above use only these contracts. Each has a suite of tests in ``tests/conformance/backends.py``.

A *reservation* is what a pool holds; an *endpoint* is one worker process; a *reference* stands for one value that
is stored or still being computed. Only the backend looks inside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.backends.backend_types import (
    DrainingNode,
    Endpoint,
    Lost,
    ProcessStatus,
    RankOutcome,
    RankStream,
    Ref,
    Reservation,
    ReserveRequest,
    SpawnRequest,
    StoreSpace,
    Ticket,
)
from phalanx.topology.slots import Slot
from phalanx.wire.messages import OUTPUT, Message
from phalanx.wire.value import Value

if TYPE_CHECKING:  # every worker process imports this module, and none of them places anything
    from phalanx.topology.placement import Holder, NodeCapacity


class Placing(Protocol):
    """Slots, and the processes on them."""

    def nodes(self) -> list[NodeCapacity]:
        """The nodes of the cluster with their total and free resources."""
        ...

    def holders(self) -> list[Holder]:
        """Who holds what on which node."""
        ...

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Reserve all slots or none. Raises PlacementError: at once where it can never be, else at the timeout."""
        ...

    def repair(self, reservation: Reservation, timeout: float) -> frozenset[int]:
        """Reserve blocks anew whose node is gone; the blocks that moved. Raises PlacementError as reserve does."""
        ...

    def release(self, reservation: Reservation) -> None:
        """Give the slots back; processes on them end. Idempotent."""
        ...

    def reservation_keys(self, reservation: Reservation) -> tuple[str, ...]:
        """Return the keys of a detached reservation, for other drivers."""
        ...

    def release_keys(self, keys: Sequence[str]) -> None:
        """Give back what a driver that is gone had reserved. Idempotent."""
        ...

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        """The node id of each slot; no process is started for it."""
        ...

    def probe(
        self, slots: Sequence[Slot], reservations: Mapping[str, Reservation], bundle: Mapping[str, float]
    ) -> list[tuple[str, ...]]:
        """The accelerator ids of each slot, learnt by a short task in it; only where no group has told them yet."""
        ...

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        """Start processes and wait for their reports. On failure nothing of them is left."""
        ...

    def find(self, name: str) -> Any | None:
        """The handle of a process that was started with that name and outlives its driver; None if there is none."""
        ...

    def start_service(self, start: Callable[[str], Any]) -> tuple[Any, Any]:
        """Call ``start`` with the address of this node in a small process that ends with this one.

        Returns:
            The handle of that process, and the result of ``start``.
        """
        ...

    def stop_service(self, service: Any) -> None:
        """End the process of a service. Idempotent."""
        ...

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        """End the processes at once, with all that they started, and wait until they are gone. Idempotent.

        Returns:
            The pids that could not be ended.
        """
        ...


class Calling(Protocol):
    """Calls on processes. Those on one of them run in the order in which they were submitted."""

    #: Whether a submitted call has ended when ``submit`` returns.
    immediate: bool

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        """Make the process a rank."""
        ...

    def submit(self, endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> Ticket:
        """Send one call; does not wait for it. The rank gives back ``returns`` objects, as the message says."""
        ...

    def call_id(self, ref: Ref) -> int:
        """Return the id by which the rank knows the call that ``ref`` is an output of, not 0."""
        ...

    def stream(self, endpoint: Endpoint, message: Message, buffer: int | None) -> RankStream:
        """Send one call of a method that yields; does not wait for it.

        The rank makes at most ``buffer`` items more than were taken; None: as many as there are.
        """
        ...

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        """Positions of the references that have ended (up to at least ``count`` unless time runs out), and the rest."""
        ...

    def outcome(self, ref: Ref) -> RankOutcome:
        """How an ended call ended."""
        ...

    def disregard(self, refs: Sequence[Ref]) -> None:
        """Note that nobody will ask how these calls end, or that whoever had to know does; does not wait."""
        ...

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        """Have ranks drop a call that they have not begun, and interrupt it in those that have; does not wait.

        ``ids`` are those by which the ranks know it.

        Returns:
            For each rank whether it is certain that it had not begun, and so never will.
        """
        ...

    def sever(self, endpoints: Sequence[Endpoint]) -> None:
        """Cut the connections of the ranks' process groups, so that those in a collective get an error."""
        ...

    def now(self) -> float:
        """Seconds on the clock by which this backend waits."""
        ...


class Storing(Protocol):
    """Values behind references: stored, or what a call gave back."""

    def put(self, value: Value) -> Ref:
        """Store a value once, to be named in any number of messages."""
        ...

    def store(self) -> StoreSpace | None:
        """How full the store is in which ``put`` stores; None where it is not bounded."""
        ...

    def address_of(self, ref: Ref) -> Any:
        """Where another process of the cluster finds a value that this one stored: something that pickles.

        It keeps nothing alive: the value is gone with the reference, and with this process.
        """
        ...

    def at(self, address: Any) -> Ref:
        """The reference to what another process stored, for ``fetch`` or a message; does not wait."""
        ...

    def ref_types(self) -> tuple[type, ...]:
        """The types of this backend's references that users may hold."""
        ...

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        """All values, in order. Raises FetchFailed at the first that failed, NotReady at the timeout."""
        ...


class Watching(Protocol):
    """Processes as seen from beside them, also while they are busy, stopped or dead."""

    def attend(self, endpoints: Sequence[Endpoint]) -> None:
        """From now on, see to it that these ranks end with this process at the latest; does not wait."""
        ...

    def alive(self, endpoint: Endpoint) -> bool:
        """Return whether the process is still known to run; cheap, no round trip."""
        ...

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        """The positions of those that are not known to run any more; a fraction of a microsecond for each."""
        ...

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        """Observe each rank from outside: also of one that is busy or stopped. Takes under a second."""
        ...

    def post_mortem(self, endpoint: Endpoint, lost: Lost | None) -> Lost:
        """All that can be told of a lost rank: cause, last lines, hints. ``lost`` is what its call ended with."""
        ...

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        """Bytes of a file on a rank's node, also while the rank is busy or dead: at most ``limit`` from ``offset`` on.

        A negative offset counts from the end of the file. Nothing is given where the file ends.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it cannot be read, or nothing on that node answers.
        """
        ...

    def signal(self, endpoints: Sequence[Endpoint], signum: int) -> None:
        """Send a signal to the ranks' processes, for fault injection."""
        ...


class Noticing(Protocol):
    """Where a process is found, and what it leaves for others on the cluster to find."""

    def job(self) -> str:
        """Return the id of this driver on the cluster."""
        ...

    def host(self) -> str:
        """The address by which the other processes of the cluster reach this one."""
        ...

    def publish(self, key: str, value: bytes | None) -> None:
        """Leave a small value for others on the cluster to find under that key, or take it back."""
        ...

    def published(self, key: str) -> bytes | None:
        """Return the value that a process of the cluster published under a key; None if there is none."""
        ...

    def going_nodes(self) -> Sequence[DrainingNode]:
        """The nodes that the cluster will lose, as far as it knows; asks it, which takes some milliseconds."""
        ...

    def ended_nodes(self) -> Sequence[DrainingNode]:
        """The nodes that it has lost because they were told to end, by a signal or by an autoscaler."""
        ...


class Backend(Placing, Calling, Storing, Watching, Noticing, Protocol):
    """A backend: all five contracts on one cluster. What needs one of them asks for that one."""

    name: str

    def connected(self) -> bool:
        """Return whether the cluster that it was made for is still this process's; costs a fraction of a microsecond.

        Once it is not, calls that need the cluster raise GroupClosed, and those that free something do nothing.
        """
        ...

    def leave(self) -> None:
        """End what this process keeps beside the cluster for its sake, after that was left. Idempotent."""
        ...
