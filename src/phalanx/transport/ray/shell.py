"""The Ray actor around a host. Its methods bear the user's names, so that dashboards and handles show them."""

from __future__ import annotations

import functools
import glob
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from phalanx.topology.slots import SlotFacts
from phalanx.transport.base import Facade, HostFactory
from phalanx.transport.facade import bare_name
from phalanx.transport.ray.plain import portable
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import is_message


class RayServices:
    """What Ray offers to the host in an actor's process."""

    in_driver = False

    def facts(self) -> tuple[SlotFacts, tuple[str, ...], str]:
        context = ray.get_runtime_context()
        ids = next((tuple(map(str, found)) for found in context.get_accelerator_ids().values() if found), ())
        slot = SlotFacts(
            node_id=context.get_node_id(),
            host=socket.gethostname(),
            node_ip=ray.util.get_node_ip_address(),
            accelerator_ids=ids,
            cpus_of_node=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        )
        return slot, _log_paths(context.get_worker_id()), context.get_worker_id()

    def folder(self) -> str:
        logs = _logs_folder()
        return os.path.join(logs, "phalanx") if logs else ""

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        try:
            return ray.get(list(refs))
        except RayTaskError as error:
            if isinstance(error.cause, RankFailure):
                raise error.cause from None
            raise


def _log_paths(worker_id: str) -> tuple[str, ...]:
    """Ray's own files with what this process prints: worker-{worker id}-{job}-{pid}.out and .err."""
    logs = _logs_folder()
    if logs is None:
        return ()
    pattern = os.path.join(logs, f"worker-{worker_id}-*-{os.getpid()}.*")
    return tuple(sorted(glob.glob(pattern), reverse=True))


def _logs_folder() -> str | None:
    """The folder of Ray's session in which this node's processes log."""
    node = getattr(ray._private.worker, "_global_node", None)  # pyright: ignore[reportAttributeAccessIssue]
    return None if node is None else node.get_logs_dir_path()


class Shell:
    """Every actor of a group: makes the host, reports, becomes a rank, and passes calls on."""

    def __init__(self, factory: HostFactory) -> None:
        self._host = factory(RayServices())

    def _px_report(self) -> Any:
        return self._host.report()

    def _px_setup(self, data: bytes, refs: Sequence[Any] = ()) -> None:
        self._host.setup(data, refs)

    def _px_call(self, data: bytes, refs: Sequence[Any] = ()) -> Any:
        return self._host.run(data, refs)


class AsyncShell:
    """The same for ``max_concurrency``: constructor and methods share the actor's one event loop."""

    def __init__(self, factory: HostFactory) -> None:
        self._host = factory(RayServices())

    async def _px_report(self) -> Any:
        return self._host.report()

    async def _px_setup(self, data: bytes, refs: Sequence[Any] = ()) -> None:
        self._host.setup(data, refs)

    async def _px_call(self, data: bytes, refs: Sequence[Any] = ()) -> Any:
        return await self._host.run_async(data, refs)


def _forward(facade: Facade, class_name: str, asynchronous: bool) -> Callable[..., Any]:
    name, role, method, _ = facade

    async def forward_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_message(args):
            return await self._host.run_async(*args)
        return portable(await self._host.run_plain_async(role, method, args, kwargs))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_message(args):
            return self._host.run(*args)
        return portable(self._host.run_plain(role, method, args, kwargs))

    chosen = forward_async if asynchronous else forward
    chosen.__name__ = name
    chosen.__qualname__ = f"{class_name}.{name}"
    return chosen


def _bare(facade: Facade) -> Callable[..., Any]:
    """The same without parameters: Ray then neither binds nor sends any, which saves a fifth of an empty call."""
    _, role, method, _ = facade

    def call(self: Any) -> Any:
        return self._host.run_bare(role, method)

    return call


@functools.lru_cache(maxsize=256)
def actor_class(class_name: str, methods: tuple[Facade, ...], asynchronous: bool) -> Any:
    """The Ray actor class for a user's class; cached, so that a second group exports nothing anew."""
    base = AsyncShell if asynchronous else Shell
    facades = {facade.name: _forward(facade, class_name, asynchronous) for facade in methods}
    if not asynchronous:
        facades |= {bare_name(facade.name): _bare(facade) for facade in methods if facade.bare}
    return ray.remote(type(class_name, (base,), facades))
