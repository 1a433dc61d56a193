"""What crosses process borders in a call: plain tuples and frozen dataclasses, cheap to pickle.

A call travels as one ``bytes`` object (Ray passes those on unpickled) and, where something is stored or by
reference, a list of the backend's references. Inside the encoded arguments such things are replaced by the
small tokens below, which name references by their index in that list.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.topology.mesh import Mesh
from phalanx.topology.slots import SlotFacts
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.value import Value

#: First bytes of every message, so that an actor method can tell it from a plain argument.
MAGIC = b"\x93phalanx\x01"

#: Environment variable of a rank that names its epoch's rendezvous store: "host:port/epoch", or "inline".
STORE_VARIABLE = "PHALANX_STORE"

#: Method names that the host answers itself: each calls its first argument, a function, with the others.
RUN = "__phalanx_run__"  # a function of the user's, with the worker before them
HOST = "__phalanx_host__"  # a function of the library (of execution/questions.py, say), with the host before them


def is_library_call(method: str) -> bool:
    """Whether a call runs a function of the library; its method may have a title behind ``HOST``, for people."""
    return method.startswith(HOST)


def titled(title: str) -> str:
    """The method of a library call that people see as ``title``."""
    return f"{HOST} {title}"


class RankCall(NamedTuple):
    """What one rank is asked to do.

    ``body`` holds the encoded (args, kwargs). None: the last reference does.

    ``epoch`` is the one whose ranks make the call together, and only they take it; ``ANY_EPOCH`` for a call that each
    rank makes by itself. ``returns`` is one of ``OUTPUT`` and ``DESCRIBED``, the number of objects that the rank
    gives back.
    ``trace`` is the id of the trace for which the rank notes what it does; empty: for none.
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
        """As :meth:`pack` does it, for one rank; quicker than with a changed copy."""
        call, epoch, role, method, _, returns, readonly, to_device, _, debug, trace = self
        return MAGIC + pickle.dumps(
            (call, epoch, role, method, keep, returns, readonly, to_device, body, debug, trace), 5
        )

    @staticmethod
    def unpack(data: bytes) -> RankCall:
        return RankCall(*pickle.loads(memoryview(data)[len(MAGIC) :]))


#: Epoch of a call of which its sender does not say that all ranks of one epoch make it together.
ANY_EPOCH = -1

#: Sent in place of a packed message for a call without arguments whose output is kept. Every argument costs a process
#: about a fifth of an empty call, so such a call has none. Its number is how many such calls its rank has been sent.
BARE = b""


def packed_bare(number: int, role: str, method: str) -> bytes:
    """What ``BARE`` stands for, where a process cannot be called without a message."""
    return MAGIC + pickle.dumps(
        (number, ANY_EPOCH, role, method, True, OUTPUT, False, False, NO_ARGUMENTS), 5
    )


#: The body of a message without arguments.
NO_ARGUMENTS = pickle.dumps(((), {}), 5)


def host_call(function: Callable[..., Any], *args: Value, call: int, epoch: int) -> bytes:
    """The message that has a rank run ``function(host, *args)``, all of which pickle to a few bytes."""
    body = pickle.dumps(((function, *args), {}), 5)
    return RankCall(call, epoch, "", HOST, True, OUTPUT, False, False, body).pack()


def is_message(args: Sequence[Any]) -> bool:
    """Whether positional arguments of an actor method are a packed message (and not a user's own)."""
    return bool(args) and type(args[0]) is bytes and args[0].startswith(MAGIC)


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
    """Token: rows ``index`` of ``count`` even pieces of a result whose parts lie on other ranks.

    ``parts`` index the references to the source parts, ``infos`` those to the :class:`PartInfo` of each. ``gather``
    says how the parts are joined.
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
    """Token: a result not here yet, as its caller would get it; ``gather`` says how its parts are joined.

    ``rows`` asks for index, count, padding and expected rows of one of its even pieces in place of all of it.
    """

    parts: tuple[int, ...]
    gather: Any
    rows: tuple[int, int, int | None, int | None] | None = None


@dataclass(frozen=True, slots=True)
class Assembled:
    """Token: a value in parts that others stored: the rows of all of them, or where not ``joined`` their list.

    Each part is the index of its reference, or its encoded bytes, and which rows of it are meant: first, one after
    the last, and whether these are all.
    """

    parts: tuple[tuple[int | bytes, tuple[int, int, bool]], ...]
    joined: bool
    pad_to_multiple: int | None = None


class SideChannel(NamedTuple):
    """Where a worker process can be asked while it is busy: its own file descriptors, opened through /proc.

    ``started`` is when the process was started, in clock ticks since boot; with the pid it names the process
    for good. ``mark`` is in the environment of everything that it starts.
    """

    started: int
    page: int
    stacks: int
    control: int
    mark: str


class ProcessInfo(NamedTuple):
    """What a worker process reports of itself before it has a rank.

    ``folder`` is where the process may keep files of its own. ``files`` is filled in on the driver once the process
    is a rank: see :class:`RankConfig`.
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
        """The file with what the process prints: the rank's own, or that of the backend before it has a rank."""
        if self.files and self.log_paths:
            return self.files + ".log"
        return self.log_paths[0] if self.log_paths else None


@dataclass(frozen=True)
class RankConfig:
    """What makes a process a rank. Plain data: it is read before any of the user's modules are imported.

    ``files`` is the beginning of the path of each file that this rank keeps, ``<folder>/<run>/<group>-<epoch>/rank-3``;
    the folder is there once the process is a rank, and no other rank's files begin like this.
    ``serves``: torch's store is in this process. ``rejoining``: other ranks of the group are there already.
    ``label`` names its roles, or its class, for people. ``had_weights`` and ``published_weights`` are the newest
    versions that the group's roles had, and published, before, by (role, name).
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
        """With the encoded ``{role: (class, args, kwargs)}`` in ``body``; None: the last reference holds it."""
        return MAGIC + pickle.dumps((self, body), 5)

    @staticmethod
    def unpack(data: bytes) -> tuple[RankConfig, bytes | None]:
        return pickle.loads(memoryview(data)[len(MAGIC) :])
