"""How the ranks of a group find each other, without a port that somebody else could take in between.

Every worker process binds a socket to port 0 before ranks are given out; rank 0 keeps its own and serves torch's
``TCPStore`` on it as soon as torch is there. ``MASTER_ADDR`` and ``MASTER_PORT`` name it, so a plain
``torch.distributed.init_process_group("gloo")`` joins it as a client. torch's own ``env://`` handler would bind
the port anew in rank 0, and would meet the keys of an earlier world in a second ``init_process_group``; so this
module puts its own handler in front, which gives every world a key prefix of its own and leaves every other
address to torch's.
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
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs, urlparse

from phalanx.errors import PhalanxError
from phalanx.wire.messages import STORE_VARIABLE
from phalanx.worker.control import control

_MODULE = "torch.distributed.rendezvous"

_worlds: Counter[str] = Counter()
_served: dict[int, Any] = {}


def listening_socket(address: str) -> socket.socket:
    """A socket that listens on a free port of this host; whoever serves the store keeps it open."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))
    server.listen(4096)
    return server


class StorePort:
    """The port of a process that may have to serve torch's store: taken before anybody knows which rank does."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None

    def take(self, address: str) -> int:
        """Take one; its number."""
        self._listening = listening_socket(address)
        return self._listening.getsockname()[1]

    def settle(self, *, serves: bool) -> None:
        """Serve the store there, or give the port back; have this process join that of its group."""
        install()
        listening, self._listening = self._listening, None
        if listening is not None:
            if serves:
                serve(listening)
            else:
                listening.close()


def serve(listening: socket.socket) -> None:
    """Serve the store on this socket (rank 0), now or as soon as torch is imported."""

    def start(_: ModuleType) -> None:
        from torch.distributed import TCPStore

        port = listening.getsockname()[1]
        if port not in _served:
            if (channel := control()) is not None:
                channel.keep_port(port)
            _served[port] = TCPStore(
                "localhost", port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
            )

    _when_imported(start)


def install() -> None:
    """Put the handler in front of torch's ``env://``, now or as soon as torch is imported. Idempotent."""

    def replace(module: ModuleType) -> None:
        handlers: dict[str, Any] = module._rendezvous_handlers  # pyright: ignore[reportAttributeAccessIssue]
        original = handlers["env"]
        if getattr(original, "phalanx", False):
            return

        def handler(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> Iterator[Any]:
            if not _is_ours():
                return original(url, timeout=timeout, **kwargs)
            return _join(url, timeout)

        handler.phalanx = True  # pyright: ignore[reportFunctionMemberAccess]
        handlers["env"] = handler

    _when_imported(replace)


def _is_ours() -> bool:
    """Whether MASTER_ADDR and MASTER_PORT still are what the group set; a user may name a store of his own."""
    named = os.environ.get(STORE_VARIABLE, "")
    given = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return named == "inline" or named.partition("/")[0] == given


def _join(url: str, timeout: timedelta) -> Iterator[Any]:
    import torch.distributed as dist

    query = parse_qs(urlparse(url).query)
    rank = int(query["rank"][0]) if "rank" in query else int(os.environ["RANK"])
    world_size = int(query["world_size"][0]) if "world_size" in query else int(os.environ["WORLD_SIZE"])
    named = os.environ[STORE_VARIABLE]
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
        address, _, epoch = named.partition("/")
        host, _, port = address.rpartition(":")
        with _making_group():
            store = dist.TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)
        # All ranks make their n-th world of a size together, so counting gives each world keys of its own.
        _worlds[f"{epoch}/{world_size}"] += 1
        prefix = f"phalanx/{epoch}/{world_size}/{_worlds[f'{epoch}/{world_size}']}"
        yield dist.PrefixStore(prefix, store), rank, world_size
    raise RuntimeError("a process group cannot be formed again from the same env:// rendezvous")


def _making_group() -> contextlib.AbstractContextManager[None]:
    channel = control()
    return contextlib.nullcontext() if channel is None else channel.making_group()


def _note_connections() -> None:
    """See to it that the connections of process groups are known as such, from the one that is being made now on."""
    module = sys.modules["torch.distributed.distributed_c10d"]
    original = module._new_process_group_helper  # pyright: ignore[reportAttributeAccessIssue]
    if getattr(original, "phalanx", False):
        return

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        with _making_group():
            return original(*args, **kwargs)

    helper.phalanx = True  # pyright: ignore[reportAttributeAccessIssue]
    module._new_process_group_helper = helper  # pyright: ignore[reportAttributeAccessIssue]


class _PostImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Runs functions once a module has been imported; the import itself is left to whoever does it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.actions: list[Any] = []
        self._inner: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        self._inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        for action in self.actions:
            action(module)


def _when_imported(action: Any) -> None:
    module = sys.modules.get(_MODULE)
    if module is not None:
        action(module)
        return
    waiting = next((f for f in sys.meta_path if isinstance(f, _PostImport)), None)
    if waiting is None:
        waiting = _PostImport(_MODULE)
        sys.meta_path.insert(0, waiting)
    waiting.actions.append(action)
