"""Interface of backends, with its types. ``tests/conformance/backends.py`` tests it on every backend.

A *reservation* is the set of slots that a pool holds. An *endpoint* is a worker process. A *reference* stands for a
value that is stored or still being computed. Only the backend looks inside them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from phalanx.topology.slots import Slot
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import OUTPUT, Message, ProcessInfo
from phalanx.wire.value import Value

if TYPE_CHECKING:  # every worker process imports this module, and none of them places anything
    from phalanx.topology.placement import Holder, NodeCapacity

#: Why a group of a cluster that was left takes no calls.
CLUSTER_LEFT = (
    "The cluster that it ran on was left: ray.shutdown() or px.shutdown() was called, or the connection was lost. "
    "Connect again with px.init() or ray.init(), then make pools and groups anew."
)
#: Why a call did not begin; the reason of the loss follows.
LOST_ARGUMENT = "an argument, such as another call's result, was lost with the process that held it: "
#: Keyword of a call of a handle without a group: the trace that it is in, its number there, and the bytes of its
#: arguments; for the process, not the method.
TRACED = "_px_traced"
NOT_TRACED = ("", 0, 0)
Ref = Any
RuntimeFactory = Callable[[Any], Any]


@dataclass(frozen=True)
class ReserveRequest:
    """Slots to reserve, all or none: ``blocks[i]`` slots on a single node, each with the resources ``bundle``.

    ``names`` replaces the names of the backend's objects, one for each block, that are otherwise made from ``name``.
    With another ``strategy`` than STRICT_PACK the slots of a block may be on several nodes.
    """

    name: str
    blocks: tuple[int, ...]
    bundle: Mapping[str, float]
    detached: bool = False
    timeout: float = 120.0
    on_nodes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    strategy: str = "STRICT_PACK"


@dataclass(eq=False)
class Reservation:
    """Slots that are held: the backend's own object of each block, and keys that identify the slots to other drivers.

    ``request`` is None for slots that somebody else reserved, which cannot be repaired. ``moved`` are the blocks that
    the present repair, or one that failed, reserves anew.
    """

    request: ReserveRequest | None
    ids: list[Any] = field(default_factory=list[Any])
    keys: list[str] = field(default_factory=list[str])
    moved: set[int] = field(default_factory=set[int])


class Facade(NamedTuple):
    """A method of a worker process for calls without a group: its name there, and its role and method."""

    name: str
    role: str
    method: str


@dataclass(frozen=True)
class SpawnRequest:
    """Worker processes to start, one per slot, in the order of ``slots``.

    ``names`` and ``namespace`` identify a process for the backend's users (None: unnamed, and the backend's own
    namespace).
    """

    class_name: str
    methods: tuple[Facade, ...]
    slots: tuple[Slot, ...]
    reservations: Mapping[str, Reservation]
    resources: Mapping[str, float]
    factory: RuntimeFactory
    names: tuple[str, ...] | None = None
    namespace: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    max_concurrency: int | None = None
    detached: bool = False
    timeout: float = 300.0


@dataclass
class Endpoint:
    """A worker process. ``facts`` is its report; ``handle`` is the backend's own object.

    Records of detached groups have it: another protocol (``group/roster.py``) goes with any other field.

    ``retired`` is True if the process left its group and all its calls have ended. ``since`` is the epoch in which it
    joined its group; -1: none.
    """

    slot: Slot
    handle: Any
    facts: ProcessInfo
    name: str | None = None
    retired: bool = False
    since: int = -1


class Ticket(NamedTuple):
    """A submitted call on a rank: the references of its value and, if requested, of its ``PartInfo``."""

    value: Ref
    info: Ref | None = None


@dataclass(frozen=True)
class Lost:
    """The cause of a process's death, as far as the backend knows it.

    ``intended``: the process was ended on purpose. ``owner_gone``: the process that owned it had ended.
    """

    reason: str
    exit: str | None = None
    hint: str | None = None
    intended: bool = False
    owner_gone: bool = False
    node_lost: bool = False
    log_tail: tuple[str, ...] = ()
    log_path: str | None = None
    stack: str = ""


@dataclass(frozen=True)
class ProcessStatus:
    """Status of a rank's process, observed from its node.

    ``running`` maps ids of calls to the seconds since they began, ``methods`` to the names of their methods, of a role
    as ``role.method``. ``told`` is the status that the rank reported itself.

    ``reachable`` is False if the process died or is stopped by a signal: ``note`` says which. ``gone`` is True if the
    process or its node was lost, even if the backend has not noticed that yet.
    """

    reachable: bool
    running: Mapping[int, float] = field(default_factory=dict[int, float])
    stack: str = ""
    note: str = ""
    methods: Mapping[int, str] = field(default_factory=dict[int, str])
    told: str = ""
    gone: bool = False


@dataclass(frozen=True)
class RankOutcome:
    """Outcome of a call on a rank: a value, a failure that the worker runtime raised, or the loss of the process."""

    value: Any = None
    failure: RankFailure | None = None
    lost: Lost | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and self.lost is None


@dataclass(frozen=True)
class DrainingNode:
    """A node that will be lost, with the reason as text. ``deadline`` is a Unix time, None if it is not known."""

    node_id: str
    deadline: float | None
    reason: str


@dataclass(frozen=True)
class StoreSpace:
    """The object store of this node in bytes, as of some tenths of a second ago."""

    capacity: int
    free: int


class RankStream(Protocol):
    """Items of a call on a rank: references to the items in order, and last to the outcome.

    The outcome is a ``StreamEnd``, a failure that the worker runtime returned (if the call was interrupted) or raised,
    or the loss of the process. Not for several threads at once.
    """

    #: A reference for ``wait``, ready once :meth:`take` returns an item.
    coming: Ref
    #: A reference for ``wait``, ready once the rank has finished the call, even if items were not taken.
    ended: Ref

    def take(self) -> Ref | None:
        """Return the next reference, None if there is none yet. Makes room for another item. Does not wait."""
        ...

    def leave(self) -> None:
        """Note that the call was cancelled, so that the rank does not wait for a reader any more."""


class FetchFailed(Exception):
    """Raised by ``fetch`` as soon as a value cannot be had; ``outcome`` of each reference returns the reason."""


class NotReady(Exception):
    """Raised by ``fetch`` when its timeout expires."""


def read_file(path: str, offset: int, limit: int) -> bytes:
    """Return at most ``limit`` bytes from ``offset`` on; a negative offset counts from the end of the file.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    with open(path, "rb") as file:
        if offset < 0:
            offset = max(0, file.seek(0, os.SEEK_END) + offset)
        file.seek(offset)
        return file.read(limit)


class Backend(Protocol):
    """A way to run worker processes, and to exchange values with them.

    Methods with a body are as in a backend without a cluster: nothing is lost, drained or shared with other processes.
    """

    name: str
    #: True if a submitted call has ended when ``submit`` returns.
    immediate: bool
    #: Id of this driver on the cluster.
    job: str = ""
    #: The types of its references that users may hold.
    ref_types: tuple[type, ...]

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
        """Reserve blocks anew whose node was lost; return the blocks that moved, also in repairs that failed.

        Raises as ``reserve``.
        """
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

    #: Returns the seconds on the clock by which this backend waits.
    now: Callable[[], float] = staticmethod(time.monotonic)

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
