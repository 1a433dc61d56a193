"""Messages of a call between processes: plain tuples and frozen dataclasses, cheap to pickle.

A call is sent as one ``bytes`` object (Ray passes those on unpickled) and, if values are stored or by reference, a
list of the backend's references. Small tokens in the encoded arguments name references by their index in that list.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.topology.mesh import Mesh
from phalanx.topology.slots import SlotFacts
from phalanx.wire.value import Value

#: First bytes of every message, which tell it from an argument of a user's call.
MAGIC = b"\x93phalanx\x01"

#: Environment variable of a rank that names its epoch's rendezvous store: "host:port/epoch", or "inline".
STORE_VARIABLE = "PHALANX_STORE"

#: Method names that the runtime handles itself: each calls its first argument, a function, with the others.
RUN = "__phalanx_run__"  # a user's function, with the worker as first argument
HOST = "__phalanx_host__"  # a function of the library, with the runtime as first argument

#: Number of objects that a rank returns: its output, or a :class:`PartInfo` before an output that may be passed on by
#: reference.
OUTPUT, DESCRIBED = 1, 2

#: Epoch of a call that each rank takes by itself, not together with the other ranks of one epoch.
ANY_EPOCH = -1

#: The body of a message without arguments.
NO_ARGUMENTS = pickle.dumps(((), {}), 5)

#: Sent in place of a message for a call without arguments whose output is kept. Every argument costs a process about a
#: fifth of an empty call, so such a call has none. Its number is the count of such calls that its rank was sent.
BARE = b""


def is_library_call(method: str) -> bool:
    """Return whether a call runs a function of the library; its method may have a title behind ``HOST``."""
    return method.startswith(HOST)


def titled(title: str) -> str:
    """Return the method of a library call that is displayed as ``title``."""
    return f"{HOST} {title}"


def full_name(role: str, method: str) -> str:
    """Return role and method for display, ``actor.update``, or the title of a library call."""
    if method.startswith(HOST) and method != HOST:
        return method.partition(" ")[2]
    return f"{role}.{method}" if role else method


def is_message(args: Sequence[Any]) -> bool:
    """Return whether positional arguments of an actor method are a packed message, not a user's own."""
    return bool(args) and type(args[0]) is bytes and args[0].startswith(MAGIC)


class RankCall(NamedTuple):
    """The call of one rank.

    Attributes:
        epoch: epoch whose ranks make the call together, and only they take it; or ``ANY_EPOCH``.
        keep: True if the output is sent back.
        returns: ``OUTPUT`` or ``DESCRIBED``.
        body: the encoded (args, kwargs); None: the last reference holds them.
        trace: id of the trace in which the rank notes the call; "": none.
    """

    call: int
    epoch: int
    role: str
    method: str
    keep: bool
    returns: int
    readonly: bool
    to_device: bool
    body: bytes | None
    debug: bool = False
    trace: str = ""

    def pack(self) -> bytes:
        return MAGIC + pickle.dumps(tuple(self), 5)

    def packed_with(self, body: bytes | None, keep: bool) -> bytes:
        """Pack with the body and ``keep`` of one rank; faster than a changed copy."""
        call, epoch, role, method, _, returns, readonly, to_device, _, debug, trace = self
        return MAGIC + pickle.dumps(
            (call, epoch, role, method, keep, returns, readonly, to_device, body, debug, trace), 5
        )

    @staticmethod
    def unpack(data: bytes) -> RankCall:
        return RankCall(*pickle.loads(memoryview(data)[len(MAGIC) :]))


def packed_bare(number: int, role: str, method: str) -> bytes:
    """Return the message that ``BARE`` stands for, for a process that cannot be called without one."""
    return RankCall(number, ANY_EPOCH, role, method, True, OUTPUT, False, False, NO_ARGUMENTS).pack()


def host_call(function: Callable[..., Any], *args: Value, call: int, epoch: int) -> bytes:
    """Return the message that runs ``function(runtime, *args)`` on a rank; the arguments pickle to a few bytes."""
    body = pickle.dumps(((function, *args), {}), 5)
    return RankCall(call, epoch, "", HOST, True, OUTPUT, False, False, body).pack()


class Message(NamedTuple):
    """One rank's call, ready to be submitted."""

    data: bytes
    refs: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """Token: the value that was stored under ``refs[index]``."""

    index: int


@dataclass(frozen=True, slots=True)
class Reference:
    """Token: the user's own reference ``refs[index]``, handed over as it is."""

    index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Token: rows ``index`` of ``count`` even pieces of a result whose parts are stored on other ranks.

    ``parts`` index the references to the source parts, ``infos`` those to the :class:`PartInfo` of each. ``gather``
    is the plan that joins the parts.
    """

    parts: tuple[int, ...]
    infos: tuple[int, ...]
    index: int
    count: int
    pad_to_multiple: int | None
    expected_rows: int | None
    gather: Any


@dataclass(frozen=True, slots=True)
class Whole:
    """Token: a complete result that has not arrived; ``gather`` is the plan that joins its parts.

    ``rows``: index, count, padding and expected rows of one of its even pieces; None: all of it.
    """

    parts: tuple[int, ...]
    gather: Any
    rows: tuple[int, int, int | None, int | None] | None = None


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
    threads: int | None = None
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
        return MAGIC + pickle.dumps((self, body), 5)

    @staticmethod
    def unpack(data: bytes) -> tuple[RankConfig, bytes | None]:
        return pickle.loads(memoryview(data)[len(MAGIC) :])
