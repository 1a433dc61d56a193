"""The Ray actor around a host. Its methods bear the user's names, so that dashboards and handles show them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from phalanx.backends.backend_types import NOT_TRACED, TRACED, Facade, HostFactory
from phalanx.backends.ray import metrics, private
from phalanx.backends.ray.ray_errors import log_once
from phalanx.backends.ray.ray_values import portable
from phalanx.errors import ArgumentLost
from phalanx.topology.environment import THREADS
from phalanx.topology.slots import SlotFacts
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import Message, ProcessInfo
from phalanx.wire.value import Value


def _no_references(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    return ()


class RayServices:
    """Services of Ray for the runtime in an actor's process.

    ``upstream`` gives the references that a method called with plain arguments would wait for: a factory whose users
    pass such values sets it.
    """

    in_driver = False

    def __init__(self) -> None:
        log_once()
        self.upstream: Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]] = _no_references

    def facts(self) -> tuple[SlotFacts, tuple[str, ...]]:
        context = private.runtime_context()
        ids = next((tuple(map(str, found)) for found in context.get_accelerator_ids().values() if found), ())
        slot = SlotFacts(
            node_id=context.get_node_id(),
            host=socket.gethostname(),
            node_ip=ray.util.get_node_ip_address(),
            accelerator_ids=ids,
            cpus_of_node=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            threads=_started_with(THREADS),
        )
        return slot, _log_paths(context.get_worker_id())

    def call_id(self) -> int:
        return private.current_call_id()

    def folder(self) -> str:
        logs = private.log_folder()
        return os.path.join(logs, "phalanx") if logs else ""

    def put(self, value: Any) -> Any:
        return private.put(value)

    def measure(self, what: str, rank: str, values: Mapping[str, float]) -> None:
        """Show values of this rank in Ray's metrics, as ``phalanx_WHAT_NAME``; see ``WorkerContext.measure``."""
        metrics.show(what, rank, values)

    def fetch(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        try:
            return private.get(list(refs), timeout=timeout)
        except RayTaskError as error:
            if isinstance(error.cause, RankFailure):
                raise error.cause from None
            raise
        except (ObjectLostError, RayActorError) as error:
            said = next(iter(str(error).splitlines()), "")
            raise ArgumentLost(
                "an argument of this call, such as another call's result, was lost with the process that held it: "
                f"{said}"
            ) from None


def _started_with(name: str) -> str | None:
    """A variable as this process was started: Ray sets a number of threads of its own when it makes an actor."""
    with contextlib.suppress(OSError, IndexError):  # there is no such file, or no such variable
        with open("/proc/self/environ", "rb") as file:
            text = b"\0" + file.read()
        return text.split(f"\0{name}=".encode(), 1)[1].split(b"\0", 1)[0].decode(errors="replace") or None
    return None


def _log_paths(worker_id: str) -> tuple[str, ...]:
    """Ray's own files with what this process prints: worker-{worker id}-{job}-{pid}.out and .err."""
    logs = private.log_folder()
    if logs is None:
        return ()
    pattern = os.path.join(logs, f"worker-{worker_id}-*-{os.getpid()}.*")
    return tuple(sorted(glob.glob(pattern), reverse=True))


def _of_worker(shell: Any, name: str) -> Any:
    """What the actor itself has not: the user's object's, for functions that are sent by ``handle.__ray_call__``.

    Raises:
        AttributeError: neither has it; also while there is no such object, and in groups of several roles.
    """
    host = shell.__dict__.get("_host")
    worker = None if host is None or name.startswith("__") else host.instances.get("")
    if worker is None:
        raise AttributeError(f"{type(shell).__name__!r} object has no attribute {name!r}")
    return getattr(worker, name)


def _message(data: bytes = b"", refs: Sequence[Any] = ()) -> Message:
    """Return the message of this task: a task without data is told by its name, behind that of the class."""
    return Message("", data, tuple(refs)) if data else Message(private.task_name().partition(".")[2])


class WorkerActor:
    """Every actor of a group: makes the host, reports, becomes a rank, and passes calls on.

    What most calls are sent to is of the class and has no parameters: Ray gives each method of an instance a hidden
    parameter for its own tracing, binds parameters on either side of a call, and passes through one more function. That
    is a tenth of what an empty call costs the driver and a rank.
    """

    _px_host: Any  # of the class too: there is one actor in a process

    def __init__(self, factory: HostFactory) -> None:
        self._host = type(self)._px_host = factory(RayServices())

    def __getattr__(self, name: str) -> Any:
        return _of_worker(self, name)

    def _px_report(self) -> ProcessInfo:
        return self._host.report()

    def _px_setup(self, data: bytes, refs: Sequence[Any] = ()) -> Value:
        return self._host.setup(data, refs)

    def _px_call(self, data: bytes, refs: Sequence[Any] = ()) -> Value:
        return self._host.run(_message(data, refs))

    @classmethod
    def _px_named_call(cls) -> Value:
        return cls._px_host.run(_message())

    def _px_stream(self, data: bytes = b"", refs: Sequence[Any] = ()) -> Generator[Value]:
        yield from self._host.stream(_message(data, refs))


class Turns:
    """When the calls of an asynchronous actor begin: each once its arguments are there, else as they came.

    An argument may be the result of an earlier call on this very group. Were it fetched on the loop before it is
    there, the earlier calls of this rank could neither go on nor hand on their outcomes, for which others wait. And
    no call waits behind another's arguments: Ray delivers the calls of asynchronous actors in any order, so that
    those arguments may be what the call itself is to give.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # first come, first served

    async def come(self, refs: Sequence[Any]) -> None:
        """Return when it is the caller's turn; what it then does before its first await is done before the next."""
        if refs:
            await _there(list(dict.fromkeys(refs)))
        async with self._lock:
            # Ray hands the outcome of a finished call on in the loop's next turn: before this call can block.
            await asyncio.sleep(0)


async def _there(refs: list[Any]) -> None:
    """Wait until all results exist, wherever that is; errors count as results. Fetches nothing.

    On a thread of its own: calls that wait in the loop's few ones could keep out the call that they wait for.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def wait() -> None:
        with contextlib.suppress(Exception):  # what is wrong, the call finds out when it fetches
            private.wait(refs, num_returns=len(refs), fetch_local=False)
        with contextlib.suppress(RuntimeError):  # the loop was closed: the process ends
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=wait, name="phalanx-arguments", daemon=True).start()
    await done


class AsyncWorkerActor:
    """The same for ``max_concurrency``: constructor and methods share the actor's one event loop."""

    def __init__(self, factory: HostFactory) -> None:
        self._services = RayServices()
        self._host = factory(self._services)
        self._turns = Turns()

    def __getattr__(self, name: str) -> Any:
        return _of_worker(self, name)

    async def _px_report(self) -> ProcessInfo:
        return self._host.report()

    async def _px_setup(self, data: bytes, refs: Sequence[Any] = ()) -> Value:
        return self._host.setup(data, refs)

    async def _px_call(self, data: bytes, refs: Sequence[Any] = ()) -> Value:
        await self._turns.come(refs)
        return await self._host.run_async(_message(data, refs))

    async def _px_named_call(self) -> Value:
        await self._turns.come(())
        return await self._host.run_async(_message())

    async def _px_stream(self, data: bytes = b"", refs: Sequence[Any] = ()) -> AsyncGenerator[Value]:
        await self._turns.come(refs)
        async with contextlib.aclosing(self._host.stream_async(_message(data, refs))) as items:
            async for item in items:
                yield item


def _forward(facade: Facade, class_name: str, asynchronous: bool) -> Callable[..., Any]:
    """Return the method of an actor that is called without a group."""
    name, role, method = facade

    async def forward_async(self: AsyncWorkerActor, *args: Value, **kwargs: Value) -> Value:
        traced = kwargs.pop(TRACED, NOT_TRACED)
        await self._turns.come(self._services.upstream(args, kwargs))
        return await self._host.run_direct_async(role, method, args, kwargs, traced, portable)

    def forward(self: WorkerActor, *args: Value, **kwargs: Value) -> Value:
        traced = kwargs.pop(TRACED, NOT_TRACED)
        return self._host.run_direct(role, method, args, kwargs, traced, portable)

    chosen = forward_async if asynchronous else forward
    chosen.__name__ = name
    chosen.__qualname__ = f"{class_name}.{name}"
    return chosen


@functools.lru_cache(maxsize=256)
def actor_class(class_name: str, methods: tuple[Facade, ...], asynchronous: bool) -> Value:
    """The Ray actor class for a user's class; cached, so that a second group exports nothing anew."""
    base = AsyncWorkerActor if asynchronous else WorkerActor
    facades = {facade.name: _forward(facade, class_name, asynchronous) for facade in methods}
    return ray.remote(type(class_name, (base,), facades))
