"""Rendezvous of the ranks of a group, without a port that another process could take in between.

Every worker process binds a socket to port 0 before it gets a rank. Rank 0 (after a replacement, a new rank) keeps its
socket, and serves torch's ``TCPStore`` on it once torch is imported. ``MASTER_ADDR`` and ``MASTER_PORT`` name it, so a
plain ``torch.distributed.init_process_group("gloo")`` joins it as a client. torch's own ``env://`` handler would bind
the port again in rank 0, and would read the keys of an earlier world in a second ``init_process_group``. So this module
puts its own handler in front, which gives every world a key prefix and leaves other addresses to torch's handler.

Sockets of process groups are recorded while a group is created, and shut down to free a hanging rank.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlparse

from phalanx.errors import PhalanxError
from phalanx.wire.messages import STORE_VARIABLE

_MODULE = "torch.distributed.rendezvous"

_worlds: Counter[str] = Counter()
#: The stores that this process serves, by port.
_served: dict[int, Any] = {}


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of this host, for torch's store if the process is to serve it."""
    host, family = ("::", socket.AF_INET6) if ":" in address else ("0.0.0.0", socket.AF_INET)
    return socket.create_server((host, 0), family=family, backlog=4096)


def join_store(listening: socket.socket | None, *, serves: bool) -> None:
    """Make this process join the store of its group. It serves the store on ``listening``, or closes this socket."""
    if listening is not None and not serves:
        listening.close()
        listening = None
    if _MODULE in sys.modules:
        _prepare(sys.modules[_MODULE], listening)
    elif not any(isinstance(finder, _PostImport) for finder in sys.meta_path):  # of an inline rank before
        sys.meta_path.insert(0, _PostImport(listening))


def _prepare(module: Any, listening: socket.socket | None) -> None:
    """Put the handler in front of torch's ``env://``, and serve the store on ``listening``."""
    handlers = module._rendezvous_handlers
    if getattr(handlers["env"], "func", None) is not _rendezvous:  # else an earlier inline rank did it
        handlers["env"] = functools.partial(_rendezvous, handlers["env"])
    if listening is not None:
        from torch.distributed import TCPStore

        port, fd = listening.getsockname()[1], listening.detach()
        _served[port] = TCPStore("localhost", port, None, True, wait_for_workers=False, master_listen_fd=fd)


def _rendezvous(
    original: Callable[..., Iterator[Any]],
    url: str,
    timeout: timedelta = timedelta(minutes=30),
    **kwargs: Any,
) -> Iterator[Any]:
    named = os.environ.get(STORE_VARIABLE, "")
    address, _, epoch = named.partition("/")
    if named != "inline" and address != f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}":
        yield from original(url, timeout=timeout, **kwargs)  # users may name a store of their own
        return
    import torch.distributed as dist

    place = {name: os.environ.get(name.upper(), "") for name in ("rank", "world_size")}
    place.update(parse_qsl(urlparse(url).query))
    rank, world_size = int(place["rank"]), int(place["world_size"])
    if named == "inline":
        if world_size > 1:
            raise PhalanxError(
                f"a process group of {world_size} ranks cannot work with backend='inline': its ranks run one "
                "after another in one process and would wait for each other for ever. Use a group of one rank "
                "here, or the ray backend (PHALANX_BACKEND=ray)"
            )
        yield dist.HashStore(), rank, world_size
    else:
        _note_connections()
        host, _, port = address.rpartition(":")
        with collectives.noting():
            store = dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
        # All ranks create their n-th world of a size together, so counting gives each world keys of its own.
        world = f"{epoch}/{world_size}"
        _worlds[world] += 1
        yield dist.PrefixStore(f"phalanx/{world}/{_worlds[world]}", store), rank, world_size


@functools.cache
def _note_connections() -> None:
    """Note the connections of all process groups that are created from now on."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    c10d._new_process_group_helper = collectives.noting()(c10d._new_process_group_helper)


class _PostImport(importlib.abc.MetaPathFinder):
    """Finder that prepares torch's rendezvous module once it was imported, and leaves the import to others."""

    def __init__(self, listening: socket.socket | None) -> None:
        self._listening = listening

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._run, loader.exec_module)
        return spec

    def _run(self, exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
        exec_module(module)
        _prepare(module, self._listening)


class Collectives:
    """The sockets of process groups."""

    def __init__(self) -> None:
        self._noted = set[str]()
        self._before: list[frozenset[str]] = []  # for each running block: the sockets from before it

    @contextlib.contextmanager
    def noting(self) -> Generator[None]:
        """Note all sockets that are opened during the block as sockets of a process group."""
        before = frozenset(_sockets().values())
        self._before.append(before)
        try:
            yield
        finally:
            self._noted.update(set(_sockets().values()) - before)
            self._before.remove(before)  # or an equal one of another thread

    def leave(self) -> None:
        """Abort torch's groups, whose destruction would wait for lost ranks, and forget the sockets of all groups."""
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        abort_groups([] if c10d is None else list(c10d._world.pg_map))
        self._noted.clear()

    def abort(self) -> None:
        """Shut the sockets down, and leave the groups, so that a thread in a collective gets an error.

        gloo's own abort frees no thread, but closing its sockets does. Listeners have no peer and stay open, because
        gloo ends the process if a listener is shut down. Connections of Ray and of the rendezvous store stay open too:
        a rank that stays in its group needs them.
        """
        for fd, name in _sockets().items():
            if name not in self._noted and all(name in before for before in list(self._before)):
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if internet and connection.getsockname()[1] not in _served:
                    connection.getpeername()  # raises for a listener
                    connection.shutdown(socket.SHUT_RDWR)
        self.leave()


def abort_groups(groups: Sequence[Any]) -> None:
    """Abort process groups, in threads since NCCL needs half a second for each. Errors are ignored.

    Operations of NCCL wait on the device. An abort ends them, and their results are garbage. gloo's frees no thread.
    """
    with ThreadPoolExecutor(len(groups) or 1) as threads:
        threads.map(lambda group: group.abort(), groups)


def _sockets() -> dict[int, str]:
    """Return the name of each socket of this process by file descriptor."""
    sockets: dict[int, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                sockets[int(fd)] = target
    return sockets


#: The process groups of this process.
collectives = Collectives()
