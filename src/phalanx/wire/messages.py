"""Messages of a call between processes: plain tuples and frozen dataclasses, cheap to pickle.

A call is sent under a name, with a single ``bytes`` object (which Ray does not pickle) and, if values are stored or by
reference, a list of the backend's references. Small placeholders in the encoded arguments name references by their
index in that list. A call without arguments is sent under its name alone: every argument takes about a fifth of the
time of an empty call.
"""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.topology.mesh import Mesh
from phalanx.topology.slots import SlotFacts

#: Environment variable of a rank that names its epoch's rendezvous store: "host:port/epoch", or "inline".
STORE_VARIABLE = "PHALANX_STORE"

#: Method names that the runtime handles itself: each calls its first argument, a function, with the others.
RUN = "__phalanx_run__"  # a user's function, with the worker as first argument
LIBRARY = "__phalanx_library__"  # a function of the library, with the runtime as first argument

#: Number of objects that a rank returns: its output, or a :class:`PartInfo` before an output that may be passed on by
#: reference.
OUTPUT, DESCRIBED = 1, 2

#: Epoch of a call that each rank accepts alone, in any epoch of its group.
ANY_EPOCH = -1

#: The body of a message without arguments.
NO_ARGUMENTS = pickle.dumps(((), {}), 5)


def is_library_call(method: str) -> bool:
    """Return whether a call runs a function of the library; its method may have a title behind ``LIBRARY``."""
    return method.startswith(LIBRARY)


def titled(title: str) -> str:
    """Return the method of a library call that is displayed as ``title``."""
    return f"{LIBRARY} {title}"


def full_name(role: str, method: str) -> str:
    """Return role and method for display, ``actor.update``, or the title of a library call."""
    if method.startswith(LIBRARY) and method != LIBRARY:
        return method.partition(" ")[2]
    return f"{role}.{method}" if role else method


class RankCall(NamedTuple):
    """The call of a rank.

    Attributes:
        epoch: epoch whose ranks make the call together, and only they take it; or ``ANY_EPOCH``.
        keep: True if the output is sent back.
        returns: ``OUTPUT`` or ``DESCRIBED``.
        body: the encoded (args, kwargs); None: the last reference holds them.
        number: the call in the order of its sender, for traces and debug mode; 0: neither is on.
        trace: id of the trace in which the rank notes the call; "": none.
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
        """Return the message, with the backend's references that the body names."""
        named = named_message(self.role, self.method, self.epoch)
        if self.body == NO_ARGUMENTS and self.keep and self.returns == OUTPUT and not self.number:
            return named
        return Message(named.name, pickle.dumps(tuple(self), 5), refs)


@functools.lru_cache(maxsize=4096)
def named_message(role: str, method: str, epoch: int) -> Message:
    """Return the message of a call without arguments: its name, such as ``actor.update@3``."""
    return Message(f"{full_name(role, method)}@{epoch}")


@functools.lru_cache(maxsize=4096)
def call_of_name(name: str) -> RankCall:
    """Return the call without arguments that is sent under a name."""
    full, _, epoch = name.rpartition("@")
    role, _, method = full.rpartition(".")
    return RankCall(int(epoch), role, method)


class Message(NamedTuple):
    """A rank's call, ready to be submitted: ``data`` is the pickled :class:`RankCall`; empty: ``name`` says all."""

    name: str
    data: bytes = b""
    refs: tuple[Any, ...] = ()

    def unpack(self) -> RankCall:
        """Return the call."""
        return RankCall(*pickle.loads(self.data)) if self.data else call_of_name(self.name)


@dataclass(frozen=True, slots=True)
class Stored:
    """Placeholder: the value that was stored under ``refs[index]``."""

    index: int


@dataclass(frozen=True, slots=True)
class Reference:
    """Placeholder: the user's own reference ``refs[index]``, passed on unchanged."""

    index: int


@dataclass(frozen=True, slots=True)
class ResultOf:
    """Placeholder: the result of a call, whose parts are stored on its ranks; ``gather`` is the plan that joins them.

    ``parts`` index the references to the parts. ``share``: index, count, padding and expected rows of a shard of equal
    size; None: the complete result. ``infos`` index the references to the :class:`PartInfo` of each part, by which a
    rank fetches only the parts that overlap its shard.
    """

    parts: tuple[int, ...]
    gather: Any
    share: tuple[int, int, int | None, int | None] | None = None
    infos: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assembled:
    """Token: a value in stored parts: their rows joined, or if not ``joined`` their list.

    Each part is the index of its reference, or its encoded bytes, and its rows: first, end, and whether these are all.
    """

    parts: tuple[tuple[int | bytes, tuple[int, int, bool]], ...]
    joined: bool
    pad_to_multiple: int | None = None


@dataclass(frozen=True)
class BackendRef:
    """A backend's reference in an output. The backend pickles it, because it counts the holders."""

    ref: Any


class PartInfo(NamedTuple):
    """Description of an output that is known without fetching it.

    ``settings`` are path and digest of each leaf without rows, by which outputs are compared. A leaf that is no plain
    value has no digest.
    """

    rows: int | None
    nbytes: int
    settings: tuple[tuple[str, bytes], ...] = ()


class StreamEnd(NamedTuple):
    """The last item of a stream: the number of items before it."""

    items: int


class SideChannel(NamedTuple):
    """File descriptors of a worker process, opened through /proc while it is busy.

    ``started`` is the start of the process in clock ticks since boot: its identity together with the pid. ``mark`` is
    in the environment of everything that it starts.
    """

    started: int
    page: int
    stacks: int
    control: int
    mark: str


class ProcessInfo(NamedTuple):
    """Report of a worker process before it has a rank.

    ``folder`` is for files of the process. ``files`` is filled in on the driver once the process is a rank: see
    :class:`RankConfig`.
    """

    slot: SlotFacts
    pid: int
    started: float
    store_port: int
    log_paths: tuple[str, ...] = ()
    side: SideChannel | None = None
    folder: str = ""
    files: str = ""

    @property
    def log(self) -> str | None:
        """The output of the process: the rank's own file, or that of the backend before it has a rank."""
        if self.files and self.log_paths:
            return self.files + ".log"
        return self.log_paths[0] if self.log_paths else None


@dataclass(frozen=True)
class RankConfig:
    """Configuration that makes a process a rank. Plain data: it is read before the user's modules are imported.

    Attributes:
        files: beginning of the path of each file of this rank, ``<folder>/<run>/<group>-<epoch>/rank-3``. The folder
            exists once the process is a rank, and no other rank's files begin like this.
        label: its roles, or its class, for display.
        serves: True if torch's store is in this process.
        rejoining: True if other ranks of the group exist already.
        had_weights: newest versions that the group's roles had before, by (role, name).
        published_weights: the same for published weights.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group: str
    epoch: int
    environment: dict[str, str]
    host: str = ""
    node_id: str = ""
    accelerator_ids: tuple[str, ...] = ()
    device_type: str = "cpu"
    local_device: int = 0
    meshes: dict[str, Mesh] = field(default_factory=dict[str, Mesh])
    asynchronous: bool = False
    files: str = ""
    label: str = ""
    trace: str = ""
    serves: bool = False
    rejoining: bool = False
    had_weights: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    published_weights: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def pack(self, body: bytes | None) -> bytes:
        """Pack with the encoded ``{role: (class, args, kwargs)}``; None: the last reference holds it."""
        return pickle.dumps((self, body), 5)

    @staticmethod
    def unpack(data: bytes) -> tuple[RankConfig, bytes | None]:
        return pickle.loads(data)
