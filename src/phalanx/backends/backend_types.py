"""Types of the interface of backends: requests, processes, tickets, and how calls ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from phalanx.topology.slots import Slot
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import ProcessInfo

#: Why a group of a cluster that was left takes no calls.
CLUSTER_LEFT = (
    "The cluster that it ran on was left: ray.shutdown() or px.shutdown() was called, or the connection was lost. "
    "Connect again with px.init() or ray.init(), then make pools and groups anew."
)
#: Keyword of a call of a handle without a group: the trace that it is in, its number there, and the bytes of its
#: arguments; for the process, not the method.
TRACED = "_px_traced"
NOT_TRACED = ("", 0, 0)
Ref = Any
HostFactory = Callable[[Any], Any]


@dataclass(frozen=True)
class ReserveRequest:
    """Slots to reserve: ``blocks[i]`` of them on one node, ``bundle`` of resources each, all or none.

    ``names`` are the backend's own, one for each block, where those made from ``name`` will not do; ``strategy``
    other than STRICT_PACK lets it take a block's slots from several nodes.
    """

    name: str
    blocks: tuple[int, ...]
    bundle: Mapping[str, float]
    detached: bool = False
    timeout: float = 120.0
    on_nodes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    strategy: str = "STRICT_PACK"


class Reservation(Protocol):
    """Slots that are held. ``ids`` name the backend's own objects (placement groups), one per block."""

    @property
    def ids(self) -> Sequence[Any]: ...


class Facade(NamedTuple):
    """A method by which a worker process can be called without a group: its name there, and what it stands for."""

    name: str
    role: str
    method: str


@dataclass(frozen=True)
class SpawnRequest:
    """Worker processes to start, one per slot, in the order of ``slots``.

    ``names`` and ``namespace`` are those under which the backend's users find a process (None: unnamed, and the
    backend's own namespace).
    """

    class_name: str
    methods: tuple[Facade, ...]
    slots: tuple[Slot, ...]
    reservations: Mapping[str, Reservation]
    resources: Mapping[str, float]
    factory: HostFactory
    names: tuple[str, ...] | None = None
    namespace: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    max_concurrency: int | None = None
    detached: bool = False
    timeout: float = 300.0


@dataclass
class Endpoint:
    """One worker process. ``facts`` is what it reported; ``handle`` is the backend's own.

    ``retired`` says that it left its group in peace: whatever it was asked has ended. ``since`` is the epoch with which
    it came to its group; -1: none.
    """

    slot: Slot
    handle: Any
    facts: ProcessInfo
    name: str | None = None
    retired: bool = False
    since: int = -1


class Ticket(NamedTuple):
    """A submitted call on a rank: the references of its value and, if it was to be described, of its ``PartInfo``."""

    value: Ref
    info: Ref | None = None


@dataclass(frozen=True)
class Lost:
    """The cause of a process's death, as far as the backend knows it.

    ``intended``: it was ended on purpose; ``owner_gone``: since the process that owned it ended.
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
    """Status of a rank's process, observed from its node. ``running`` maps call numbers to seconds.

    ``methods`` are their names by number, a role's with the role before a dot.

    ``told`` is how the rank said itself that it stands.

    ``reachable`` is False for a process that is gone, or stopped by a signal: ``note`` says so. ``gone``: it is not
    there any more, or its node is lost, whether or not the backend has noticed that yet.
    """

    reachable: bool
    running: Mapping[int, float] = field(default_factory=dict[int, float])
    stack: str = ""
    note: str = ""
    methods: Mapping[int, str] = field(default_factory=dict[int, str])
    told: str = ""
    gone: bool = False

    def with_stack(self, stack: str, note: str) -> ProcessStatus:
        """The same with its stacks, or with why there are none."""
        return replace(self, stack=stack, note=self.note or note)

    def with_loss(self, gone: bool) -> ProcessStatus:
        """The same where that is known of its node."""
        return replace(self, gone=gone)


@dataclass(frozen=True)
class RankOutcome:
    """How one rank's call ended: with a value, a failure that its host raised, or the loss of its process."""

    value: Any = None
    failure: RankFailure | None = None
    lost: Lost | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None and self.lost is None


@dataclass(frozen=True)
class DrainingNode:
    """A node that will be taken away: ``deadline`` is when, as a Unix time, None where nobody said; why, in words."""

    node_id: str
    deadline: float | None
    reason: str


@dataclass(frozen=True)
class StoreSpace:
    """The object store of this node in bytes, as of some tenths of a second ago."""

    capacity: int
    free: int


class RankStream(Protocol):
    """Items of one rank of a call: references in order, of its items and last of how it ended.

    The last one stands for a ``StreamEnd``, a failure that its host gave (where the call was interrupted) or raised, or
    the loss of its process. Not for several threads at once.
    """

    @property
    def coming(self) -> Ref:
        """For ``wait``: there once :meth:`take` gives something."""
        ...

    @property
    def ended(self) -> Ref:
        """For ``wait``: there once the rank is through with the call, whether or not its items were taken."""
        ...

    def take(self) -> Ref | None:
        """The next reference, which makes room for one item more; None if none is there. Does not wait."""
        ...

    def leave(self) -> None:
        """Note that the call was cancelled, so that the rank need not wait for a reader any more."""
        ...


class FetchFailed(Exception):
    """Raised by ``fetch`` as soon as one of its values cannot be had; ``outcome`` tells which and why."""


class NotReady(Exception):
    """Raised by ``fetch`` when its timeout expires."""
