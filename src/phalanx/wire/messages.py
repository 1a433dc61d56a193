"""Messages of a call between processes: plain tuples and dataclasses, cheap to pickle.

A message has a name, a single ``bytes`` object (which Ray does not pickle) and, for values that are stored or passed by
reference, a list of the backend's references. Small placeholders in the encoded arguments index that list. A call
without arguments is sent by name alone: each argument of a Ray task costs about a fifth of the time of an empty call.
"""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.topology.mesh import Mesh
from phalanx.topology.slots import SlotInfo

#: Environment variable of a rank that names its epoch's rendezvous store: "host:port/epoch", or "inline".
STORE_VARIABLE = "PHALANX_STORE"

#: Method names that the worker runtime handles itself: each calls its first argument, a function, with the others.
RUN = "__phalanx_run__"  # a user's function, with the worker as first argument
LIBRARY = "__phalanx_library__"  # a function of the library, with the runtime as first argument

#: Number of objects that a rank returns: the output alone, or a :class:`PartInfo` and an output that may be passed on
#: by reference.
OUTPUT, DESCRIBED = 1, 2

#: Epoch of a call that a rank accepts in any epoch of its group.
ANY_EPOCH = -1

#: The body of a message without arguments.
NO_ARGUMENTS = pickle.dumps(((), {}), 5)


#: Role and name of weights.
WeightsKey = tuple[str, str]


def is_library_call(method: str) -> bool:
    """Return whether a call runs a function of the library. A title may follow ``LIBRARY`` in the method's name."""
    return method.startswith(LIBRARY)


def titled(title: str) -> str:
    """Return the method name of a library call that is displayed as ``title``."""
    return f"{LIBRARY} {title}"


def full_name(role: str, method: str) -> str:
    """Return the display name of a call: ``role.method`` such as ``actor.update``, or the title of a library call."""
    if method.startswith(LIBRARY) and method != LIBRARY:
        return method.partition(" ")[2]
    return f"{role}.{method}" if role else method


class RankCall(NamedTuple):
    """A call on a rank.

    Attributes:
        epoch: group epoch in which the ranks run the call together; ranks of other epochs refuse it. ``ANY_EPOCH``: all
            accept it.
        keep: True if the output is sent back.
        returns: ``OUTPUT`` or ``DESCRIBED``.
        body: the encoded (args, kwargs); None: the last reference holds them.
        number: number of the call at its sender, for traces and debug mode; 0 if both are off.
        trace: id of the trace in which the rank records the call; "": none.
    """

    epoch: int
    role: str
    method: str
    keep: bool = True
    returns: int = OUTPUT
    readonly: bool = False
    to_device: bool = False
    body: bytes | None = NO_ARGUMENTS
    number: int = 0
    trace: str = ""

    def pack(self, refs: tuple[Any, ...] = ()) -> Message:
        """Return the message of the call. ``refs`` are the backend's references that the body indexes."""
        named = named_message(self.role, self.method, self.epoch)
        if self.body == NO_ARGUMENTS and self.keep and self.returns == OUTPUT and not self.number:
            return named
        return Message(named.name, pickle.dumps(tuple(self), 5), refs)


@functools.lru_cache(maxsize=4096)
def named_message(role: str, method: str, epoch: int) -> Message:
    """Return the message of a call without arguments: a name alone, such as ``actor.update@3``."""
    return Message(f"{full_name(role, method)}@{epoch}")


@functools.lru_cache(maxsize=4096)
def call_of_name(name: str) -> RankCall:
    """Return the call of a message without data, given its name."""
    full, _, epoch = name.rpartition("@")
    role, _, method = full.rpartition(".")
    return RankCall(int(epoch), role, method)


class Message(NamedTuple):
    """An encoded call on a rank: ``data`` is the pickled :class:`RankCall`, or empty if ``name`` is sufficient."""

    name: str
    data: bytes = b""
    refs: tuple[Any, ...] = ()

    def unpack(self) -> RankCall:
        """Return the decoded call."""
        return RankCall(*pickle.loads(self.data)) if self.data else call_of_name(self.name)


@dataclass(frozen=True, slots=True)
class StoredPlaceholder:
    """Placeholder of the value that is stored under ``refs[index]``."""

    index: int


@dataclass(frozen=True, slots=True)
class RefPlaceholder:
    """Placeholder of the user's own reference ``refs[index]``, which is passed on unchanged."""

    index: int


@dataclass(frozen=True, slots=True)
class ResultOf:
    """Placeholder of the result of a call, whose parts are stored on its ranks; ``gather`` is the plan that joins them.

    ``parts`` are indices of the references to the parts. ``shard`` is the rank's shard of the rows; None: the complete
    result. ``infos`` are indices of the references to the :class:`PartInfo` of each part, with which a rank fetches
    only the parts that overlap its shard.
    """

    parts: tuple[int, ...]
    gather: Any
    shard: Any = None
    infos: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinedPlaceholder:
    """Placeholder of a value in several parts: their rows joined, or the list of the parts if not ``joined``.

    A part is the index of its reference or its encoded bytes, with its row range: first, end, and whether the range
    covers the whole part.
    """

    parts: tuple[tuple[int | bytes, int, int, bool], ...]
    joined: bool
    pad_to_multiple: int | None = None


class PartInfo(NamedTuple):
    """Description of an output, available without fetching the output.

    ``rows`` is None without rows, and -1 if leaves have different numbers of rows. ``settings`` are the path and digest
    of each leaf without rows, by which outputs are compared. Leaves that are not plain values have no digest.
    """

    rows: int | None
    nbytes: int
    settings: tuple[tuple[str, bytes], ...] = ()


class StreamEnd(NamedTuple):
    """The last item of a stream: the number of items before it."""

    items: int


class SideChannel(NamedTuple):
    """File descriptors of a worker process, which its node's agent opens through /proc, also while the process is busy.

    ``started`` is the start time of the process in clock ticks since boot, which identifies it together with the pid.
    ``mark`` is in the environment of all processes that it starts.
    """

    started: int
    page: int
    stacks: int
    control: int
    mark: str


class ProcessInfo(NamedTuple):
    """Report of a worker process before it becomes a rank.

    ``folder`` is the folder for files of the process. The driver sets ``files`` (see :class:`RankConfig`) once the
    process is a rank.
    """

    slot: SlotInfo
    pid: int
    started: float
    store_port: int
    log_paths: tuple[str, ...] = ()
    side: SideChannel | None = None
    folder: str = ""
    files: str = ""

    @property
    def log(self) -> str | None:
        """Path of the process's output: the rank's own file, or the backend's file before the process is a rank."""
        if self.files and self.log_paths:
            return self.files + ".log"
        return self.log_paths[0] if self.log_paths else None


@dataclass
class RankConfig:
    """Configuration that makes a process a rank. Plain data: it is read before the user's modules are imported.

    Attributes:
        device_type: torch's name of the accelerator ("cuda", "npu", ...), or "cpu".
        local_device: index of the accelerator that this process must use.
        meshes: meshes that were given to the group.
        files: prefix of the paths of this rank's files, ``<folder>/<run>/<group>-<epoch>/rank-3``. The folder is
            created with the first file. The prefix is unique to the rank.
        label: its roles or its class, for display.
        serves: True if torch's rendezvous store runs in this process.
        rejoining: True if other ranks of the group exist already.
        had_weights: latest versions of accepted weights that the group's roles had before, by (role, name).
        published_weights: latest versions of published weights, by (role, name).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: str = ""
    epoch: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    host: str = ""
    node_id: str = ""
    accelerator_ids: tuple[str, ...] = ()
    device_type: str = "cpu"
    local_device: int = 0
    meshes: dict[str, Mesh] = field(default_factory=dict)
    asynchronous: bool = False
    files: str = ""
    label: str = ""
    trace: str = ""
    serves: bool = False
    rejoining: bool = False
    had_weights: dict[WeightsKey, int] = field(default_factory=dict)
    published_weights: dict[WeightsKey, int] = field(default_factory=dict)

    def pack(self, body: bytes | None) -> bytes:
        """Pack with ``body``, the encoded ``{role: (class, args, kwargs)}``, or None if the last reference holds it."""
        return pickle.dumps((self, body), 5)

    @staticmethod
    def unpack(data: bytes) -> tuple[RankConfig, bytes | None]:
        return pickle.loads(data)
