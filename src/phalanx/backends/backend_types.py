"""Types of the interface of backends: requests, processes, tickets, and how calls ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

    ``request`` is None for slots that somebody else reserved, which cannot be repaired.
    """

    request: ReserveRequest | None
    ids: list[Any] = field(default_factory=list[Any])
    keys: list[str] = field(default_factory=list[str])


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

    @property
    def coming(self) -> Ref:
        """A reference for ``wait``, ready once :meth:`take` returns an item."""
        ...

    @property
    def ended(self) -> Ref:
        """A reference for ``wait``, ready once the rank has finished the call, even if items were not taken."""
        ...

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
