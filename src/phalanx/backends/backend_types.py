"""Interface of backends, with its types. ``tests/conformance/test_backends.py`` tests it on every backend.

A *reservation* is the set of slots that a pool holds. An *endpoint* is a worker process. A *reference* stands for a
value that is stored or still being computed. They are opaque to all code but the backend.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from phalanx.topology.slots import Slot
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import OUTPUT, Message, ProcessInfo
from phalanx.wire.value import Value

if TYPE_CHECKING:  # every worker process imports this module, but never places slots
    from phalanx.topology.placement import Holder, NodeCapacity, Resources

#: Error text: why a group refuses calls after its cluster was left.
CLUSTER_LEFT = (
    "The cluster that it ran on was left: ray.shutdown() or px.shutdown() was called, or the connection was lost. "
    "Connect again with px.init() or ray.init(), then create pools and groups again."
)
#: Start of an error text: why a call did not begin. The cause of the loss follows.
LOST_ARGUMENT = "an argument, such as another call's result, was lost with the process that held it: "
#: Keyword argument of a call without a group, for the worker process and not the method: the id of its trace, its
#: number in the trace, and the bytes of its arguments.
TRACED = "_px_traced"
NOT_TRACED = ("", 0, 0)
Ref = Any
Waited = tuple[list[int], list[int]]
"""The positions of references that are ready, and of the others."""
RuntimeFactory = Callable[[Any], Any]


@dataclass(frozen=True)
class ReserveRequest:
    """Slots to reserve, all or none: ``blocks[i]`` slots on a single node, each with the resources ``bundle``.

    ``names`` has a name for the backend's object of each block; empty: names are derived from ``name``. With another
    ``strategy`` than STRICT_PACK, the slots of a block may be on several nodes. ``timeout`` is in seconds.
    """

    name: str
    blocks: tuple[int, ...]
    bundle: Resources
    detached: bool = False
    timeout: float = 120.0
    on_nodes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    strategy: str = "STRICT_PACK"


@dataclass(eq=False)
class Reservation:
    """Reserved slots: ``ids`` are the backend's objects of the blocks, ``keys`` identify the blocks to other drivers.

    ``request`` is None for slots that another program reserved, which cannot be repaired.
    """

    request: ReserveRequest | None
    ids: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


class Facade(NamedTuple):
    """A method of a worker actor for calls without a group: its name on the actor, and the role and method it calls."""

    name: str
    role: str
    method: str


@dataclass(frozen=True)
class SpawnRequest:
    """Worker processes to start, one per slot, in the order of ``slots``.

    Other programs find the processes by ``names`` and ``namespace`` (None: no names, and the namespace of the
    backend). ``timeout`` is in seconds.
    """

    class_name: str
    methods: tuple[Facade, ...]
    slots: tuple[Slot, ...]
    reservations: Mapping[str, Reservation]
    resources: Resources
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

    Records of detached groups contain endpoints: a change of the fields needs a new ``PROTOCOL`` in
    ``group/roster.py``.

    ``retired`` is True if the process left its group and all its calls have ended.
    """

    slot: Slot
    handle: Any
    facts: ProcessInfo
    name: str | None = None
    retired: bool = False


class ResultHandle(NamedTuple):
    """A submitted call on a rank: references to its value and, if requested, to its ``PartInfo``."""

    value: Ref
    info: Ref | None = None


@dataclass(frozen=True)
class Lost:
    """Cause of the death of a process, as far as the backend knows it.

    ``intended``: the process was ended on purpose. ``owner_gone``: it was ended because its owner process had ended.
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

    ``running`` maps the ids of running calls to the seconds since their start, ``methods`` maps them to the full names
    of their methods (``role.method`` in a group with roles). ``status`` is the status line that the rank wrote itself.

    ``reachable`` is False if the process died, is stopped by a signal, or cannot be observed; ``note`` is the reason.
    ``gone`` is True if the process or its node was lost, even if the backend has not noticed the loss yet.
    """

    reachable: bool
    running: Mapping[int, float] = field(default_factory=dict)
    stack: str = ""
    note: str = ""
    methods: Mapping[int, str] = field(default_factory=dict)
    status: str = ""
    gone: bool = False


@dataclass(frozen=True)
class RankOutcome:
    """Outcome of a call on a rank: its value, the failure that the worker runtime raised, or the process's loss."""

    value: Any = None
    failure: RankFailure | None = None
    lost: Lost | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and self.lost is None


@dataclass(frozen=True)
class DrainingNode:
    """A node that will be lost. ``deadline`` is a Unix time in seconds, None if unknown; ``reason`` is text."""

    node_id: str
    deadline: float | None
    reason: str


@dataclass(frozen=True)
class StoreSpace:
    """Capacity and free space of this node's object store in bytes, some tenths of a second old."""

    capacity: int
    free: int


class RankStream(Protocol):
    """Items of a call on a rank: references to the items in order, then a reference to the outcome.

    The outcome is a ``StreamEnd``, a failure that the worker runtime returned (if the call was interrupted) or raised,
    or the loss of the process. Not thread-safe.
    """

    #: A reference for ``wait``, ready once :meth:`take` returns an item.
    coming: Ref
    #: A reference for ``wait``, ready once the rank has finished the call, even if not all items were taken.
    ended: Ref

    def take(self) -> Ref | None:
        """Return the next reference, or None if there is none yet. The rank may then make another item. Never waits."""
        ...

    def leave(self) -> None:
        """Note that the call was cancelled, so that the rank does not wait until items are taken."""


class FetchFailed(Exception):
    """Raised by ``fetch`` if a value failed or was lost; ``outcome`` of each reference returns the reason."""


class NotReady(Exception):
    """Raised by ``fetch`` when its timeout expires."""


def read_file(path: str, offset: int, limit: int) -> bytes:
    """Return at most ``limit`` bytes of a file from ``offset`` on; a negative offset counts from the end.

    Raises:
        OSError: if the file does not exist or cannot be read.
    """
    with open(path, "rb") as file:
        if offset < 0:
            offset = max(0, file.seek(0, os.SEEK_END) + offset)
        file.seek(offset)
        return file.read(limit)


class Backend(Protocol):
    """Interface to worker processes: starts them, calls their methods and exchanges values with them.

    The default implementations are for a backend without a cluster, which has no nodes to lose and no other processes.
    """

    name: str
    #: True if a submitted call has ended when ``submit`` returns.
    immediate: bool
    #: Id of this driver on the cluster.
    job: str = ""
    #: Types of the backend's references that users may hold.
    ref_types: tuple[type, ...]

    def connected(self) -> bool:
        """Return whether this process is still connected to the backend's cluster. Takes under 1 us.

        On a cluster that was left, methods that need it raise GroupClosed, and methods that free something do nothing.
        """
        return True

    def leave(self) -> None:
        """Release the backend's helpers in this process, once no group of this process is open on it. Idempotent."""

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
            PlacementError: at once if the nodes are too small for the request, else if its timeout expires.
        """
        ...

    def repair(self, reservation: Reservation, blocks: Collection[int], timeout: float) -> None:
        """Reserve again those ``blocks`` whose node was lost or is drained.

        Raises:
            PlacementError: if the blocks do not fit within ``timeout`` seconds.
        """

    def release(self, keys: Sequence[str]) -> None:
        """Free the slots of these keys, including keys of drivers that have ended. Ends their processes. Idempotent."""

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        """Return the node id of each slot, without starting a process."""
        ...

    def probe(
        self, slots: Sequence[Slot], reservations: Mapping[str, Reservation], bundle: Resources
    ) -> list[tuple[str, ...]]:
        """Return the accelerator ids of each slot, for pools whose slots no group has reported yet."""
        ...

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        """Start processes and wait for their reports. If an error is raised, all of them are ended.

        The processes end with this process at the latest, unless the request is for detached processes.
        """
        ...

    def find(self, name: str) -> Any | None:
        """Return the handle of the detached process ``name``, or None if there is none."""
        return None

    def start_service(self, start: Callable[[str], Any]) -> tuple[Any, Any]:
        """Call ``start`` with the address of this node, in a small process that ends with the calling process.

        Returns:
            The handle of the service's process, and the result of ``start``.
        """
        ...

    def stop_service(self, service: Any) -> None:
        """End the process of a service. Idempotent."""

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        """Kill the processes and all their descendants, and wait until they have ended. Idempotent.

        Returns:
            The pids of processes that did not end.
        """
        ...

    # Calls on processes. Each process runs its calls in the order in which they were submitted

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> ResultHandle:
        """Make the process a rank, with the packed ``RankConfig`` ``data``."""
        ...

    def submit(self, endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> ResultHandle:
        """Send a call without waiting for it. ``returns`` must equal ``RankCall.returns`` of the message."""
        ...

    def call_id(self, ref: Ref) -> int:
        """Return the id that the rank uses for the call whose output ``ref`` is; never 0."""
        ...

    def stream(self, endpoint: Endpoint, message: Message, buffer: int | None) -> RankStream:
        """Send a call of a method that yields, without waiting for it.

        The rank runs at most ``buffer`` items ahead of the reader; None: no limit.
        """
        ...

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> Waited:
        """Wait until ``count`` references are ready or ``timeout`` seconds have passed (None: no timeout).

        Returns:
            The positions of ready references, and of the other references.
        """
        ...

    def outcome(self, ref: Ref) -> RankOutcome:
        """Return the outcome of a call that has ended."""
        ...

    def disregard(self, refs: Sequence[Ref]) -> None:
        """Note that the outcomes of these calls are no longer needed. Does not wait."""

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        """Cancel a call without waiting for its end: ranks that have not begun it drop it, the others are interrupted.

        ``ids`` are the ids of the call on each rank (``call_id``).

        Returns:
            For each rank, True if the rank had certainly not begun the call, and so will never run it.
        """
        ...

    def sever(self, endpoints: Sequence[Endpoint]) -> None:
        """Shut down the connections of the ranks' process groups, so that collectives in flight raise an error."""

    #: Returns the seconds of the clock by which this backend waits.
    now: Callable[[], float] = staticmethod(time.monotonic)

    # Values behind references: stored values, and results of calls

    def put(self, value: Value) -> Ref:
        """Store a value and return a reference, which any number of messages can name."""
        ...

    def store(self) -> StoreSpace | None:
        """Return the space of the store that ``put`` uses, or None if the store is not bounded."""
        return None

    def address_of(self, ref: Ref) -> Any:
        """Return a picklable address, by which other processes of the cluster find a value of this process.

        The address does not keep the value alive: the value is freed with the reference, and with this process.
        """
        ...

    def at(self, address: Any) -> Ref:
        """Return a reference to a value of another process, for ``fetch`` or a message. Does not wait."""
        ...

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        """Return the values of the references, in order.

        Raises:
            FetchFailed: as soon as a value failed or was lost.
            NotReady: if ``timeout`` seconds pass first.
        """
        ...

    # Processes as observed from outside, also while they are busy, stopped or dead

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        """Return the positions of the processes known to be dead; all, if the cluster was left. Under 1 us for each."""
        ...

    def inspect(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        """Return the status of each rank's process, with its stack if ``stacks``; takes some seconds at most.

        Ranks are observed from outside and not called: they may be busy or stopped.
        """
        ...

    def post_mortem(self, endpoint: Endpoint, lost: Lost | None) -> Lost:
        """Return the loss of a rank with cause, last log lines and hints. ``lost``: the loss that its call reported."""
        ...

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        """Return at most ``limit`` bytes from ``offset`` of a file on a rank's node, also if the rank is busy or dead.

        A negative offset counts from the end of the file. At the end of the file the result is empty.

        Raises:
            FileNotFoundError: if there is no such file.
            OSError: if the file cannot be read or the node does not respond.
        """
        ...

    def signal(self, endpoints: Sequence[Endpoint], signum: int) -> None:
        """Send a signal to the ranks' processes, for fault injection."""

    # The cluster: values that processes publish, and nodes that will be lost

    def publish(self, key: str, value: bytes | None) -> None:
        """Publish a small value under a key for other processes of the cluster; None removes the key."""

    def published(self, key: str) -> bytes | None:
        """Return the value that a process of the cluster published under a key, or None if there is none."""
        ...

    def draining_nodes(self, ended: bool = False) -> Sequence[DrainingNode]:
        """Return the nodes that the cluster is about to lose. Takes some milliseconds.

        With ``ended``, return also the nodes that were lost because a signal or an autoscaler ended them.
        """
        return ()
