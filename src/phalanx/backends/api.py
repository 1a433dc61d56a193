"""Interface of backends. ``tests/conformance/backends.py`` tests it on every backend.

Methods with a body are as in a backend without a cluster: nothing is lost, drained or shared with other processes.

A *reservation* is the set of slots that a pool holds. An *endpoint* is a worker process. A *reference* stands for a
value that is stored or still being computed. Only the backend looks inside them.
"""

from __future__ import annotations

import time
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


class Backend(Protocol):
    """A way to run worker processes, and to exchange values with them."""

    name: str
    #: True if a submitted call has ended when ``submit`` returns.
    immediate: bool

    def connected(self) -> bool:
        """Return whether this process is still connected to the backend's cluster. Takes under 1 us.

        Afterwards calls that need the cluster raise GroupClosed, and calls that free something do nothing.
        """
        return True

    def leave(self) -> None:
        """Release the local helpers of the backend, once no group of this process is open on it. Idempotent."""

    # Slots, and the processes on them

    def nodes(self) -> list[NodeCapacity]:
        """Return the nodes of the cluster with their total and free resources."""
        ...

    def holders(self) -> list[Holder]:
        """Return the reservations that hold resources, by node."""
        ...

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Reserve all slots or none.

        Raises:
            PlacementError: at once if the request can never be met, else at its timeout.
        """
        ...

    def repair(self, reservation: Reservation, timeout: float) -> frozenset[int]:
        """Reserve blocks anew whose node was lost; return the blocks that moved. Raises as ``reserve``."""
        return frozenset()

    def release(self, keys: Sequence[str]) -> None:
        """Free the slots of these keys, also of a driver that has ended; processes on them end. Idempotent."""

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        """Return the node id of each slot. No process is started for it."""
        ...

    def probe(
        self, slots: Sequence[Slot], reservations: Mapping[str, Reservation], bundle: Mapping[str, float]
    ) -> list[tuple[str, ...]]:
        """Return the accelerator ids of each slot by a short task in it. Only needed before a group reports them."""
        ...

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        """Start processes and wait for their reports. After an error none of them is left.

        They end with this process at the latest, unless the request is for detached processes.
        """
        ...

    def find(self, name: str) -> Any | None:
        """Return the handle of the detached process of that name, None if there is none."""
        return None

    def start_service(self, start: Callable[[str], Any]) -> tuple[Any, Any]:
        """Call ``start`` with the address of this node in a small process that ends with the calling process.

        Returns:
            The handle of that process, and the result of ``start``.
        """
        ...

    def stop_service(self, service: Any) -> None:
        """End the process of a service. Idempotent."""

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        """Kill the processes with all their descendants, and wait until they have ended. Idempotent.

        Returns:
            The pids that could not be ended.
        """
        ...

    # Calls on processes. Each process runs its calls in the order in which they were submitted

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        """Make the process a rank."""
        ...

    def submit(self, endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> Ticket:
        """Send a call without waiting for it. The rank returns ``returns`` objects, as the message says."""
        ...

    def call_id(self, ref: Ref) -> int:
        """Return the id by which the rank knows the call that ``ref`` is an output of, not 0."""
        ...

    def stream(self, endpoint: Endpoint, message: Message, buffer: int | None) -> RankStream:
        """Send a call of a method that yields, without waiting for it.

        The rank makes at most ``buffer`` items more than were taken; None: no limit.
        """
        ...

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        """Wait until ``count`` references are ready or the timeout expires.

        Returns:
            The positions of the references that are ready, and of the rest.
        """
        ...

    def outcome(self, ref: Ref) -> RankOutcome:
        """Return the outcome of a call that has ended."""
        ...

    def disregard(self, refs: Sequence[Ref]) -> None:
        """Note that the outcomes of these calls are not needed any more. Does not wait."""

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        """Cancel a call without waiting for its end: ranks that have not begun it drop it, the others are interrupted.

        ``ids`` are the ids of the call on each rank.

        Returns:
            For each rank, True if the rank certainly had not begun the call, and so never will.
        """
        ...

    def sever(self, endpoints: Sequence[Endpoint]) -> None:
        """Cut the connections of the ranks' process groups, so that ranks in a collective get an error."""

    def now(self) -> float:
        """Return the seconds on the clock by which this backend waits."""
        return time.monotonic()

    # Values behind references: stored values, and results of calls

    def put(self, value: Value) -> Ref:
        """Store a value once. Any number of messages can name the reference."""
        ...

    def store(self) -> StoreSpace | None:
        """Return the space of the store that ``put`` uses, None if it is not bounded."""
        return None

    def address_of(self, ref: Ref) -> Any:
        """Return a picklable address, by which other processes of the cluster find a value of this process.

        The address keeps nothing alive: the value ends with the reference, and with this process.
        """
        ...

    def at(self, address: Any) -> Ref:
        """Return a reference to a value that another process stored, for ``fetch`` or a message. Does not wait."""
        ...

    def ref_types(self) -> tuple[type, ...]:
        """Return the types of this backend's references that users may hold."""
        ...

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        """Return all values, in order.

        Raises:
            FetchFailed: as soon as a value cannot be had.
            NotReady: the timeout expired.
        """
        ...

    # Processes as observed from outside, also while they are busy, stopped or dead

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        """Return the positions of processes that are not known to run any more. Takes under 1 us for each."""
        ...

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        """Observe each rank from outside, also if it is busy or stopped. Takes some seconds at most."""
        ...

    def post_mortem(self, endpoint: Endpoint, lost: Lost | None) -> Lost:
        """Return everything known of a lost rank: cause, last lines, hints. ``lost`` is the outcome of its call."""
        ...

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        """Read at most ``limit`` bytes from ``offset`` of a file on a rank's node, also if the rank is busy or dead.

        A negative offset counts from the end of the file. At the end of the file the result is empty.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: the file cannot be read, or nothing on that node answers.
        """
        ...

    def signal(self, endpoints: Sequence[Endpoint], signum: int) -> None:
        """Send a signal to the ranks' processes, for fault injection."""

    # The cluster: this process in it, values that processes publish, and nodes that will be lost

    def job(self) -> str:
        """Return the id of this driver on the cluster."""
        return ""

    def publish(self, key: str, value: bytes | None) -> None:
        """Publish a small value under a key for other processes of the cluster; None removes it."""

    def published(self, key: str) -> bytes | None:
        """Return the value that a process of the cluster published under a key; None if there is none."""
        ...

    def draining_nodes(self, ended: bool = False) -> Sequence[DrainingNode]:
        """Return the nodes that the cluster knows it will lose. Asks the cluster, which takes some milliseconds.

        With ``ended``, return also the nodes that it lost because a signal or an autoscaler ended them.
        """
        return ()
