"""The Ray actor around a worker runtime. It also has methods with the user's names, for calls without a group."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import logging
import os
import pickle
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from phalanx.backends.backend_types import LOST_ARGUMENT, NOT_TRACED, TRACED, Facade, RuntimeFactory
from phalanx.backends.ray import metrics, private
from phalanx.backends.ray.ray_errors import log_once
from phalanx.errors import ArgumentLost
from phalanx.topology.environment import THREADS
from phalanx.topology.slots import SlotInfo
from phalanx.wire.codec import Encoded, encode
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import Message, ProcessInfo
from phalanx.wire.value import Value

_ATOMS = (type(None), bool, int, float)
_PACKED_BYTES = 64 << 10
_MARK = b"\x93phalanx\xd1\x0b\xe4\x8f\x1a\xc6\x55\x02"
"""First bytes of a packed output. Bytes of users do not begin with it."""


class RayServices:
    """Services of Ray for the worker runtime in an actor's process.

    ``upstream`` returns the references that a call without a group has to wait for, given its arguments. Factories of
    worker runtimes may set it.
    """

    in_driver = False

    def __init__(self) -> None:
        log_once()
        # Ray prints the error of an argument that is not fetched because another argument failed.
        logging.getLogger(private.WORKER_LOGGER).addFilter(
            lambda record: RankFailure.__name__ not in str(record.msg)
        )
        self.upstream: Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any]] = lambda _args, _kwargs: ()

    def facts(self) -> tuple[SlotInfo, tuple[str, ...], str]:
        context = private.runtime_context()
        slot = SlotInfo(
            node_id=context.get_node_id(),
            host=socket.gethostname(),
            node_ip=ray.util.get_node_ip_address(),
            accelerator_ids=private.accelerator_ids(),
            cpus_of_node=len(os.sched_getaffinity(0)),
            threads=_started_with(THREADS),
        )
        logs = private.log_folder()
        if logs is None:
            return slot, (), ""
        # Ray's files with the output of this process: worker-{worker id}-{job}-{pid}.out and .err
        own = glob.glob(f"{logs}/worker-{context.get_worker_id()}-*-{os.getpid()}.*")
        return slot, tuple(sorted(own, reverse=True)), os.path.join(logs, "phalanx")

    call_id = staticmethod(private.current_call_id)

    def measure(self, what: str, rank: str, values: Mapping[str, float]) -> None:
        """Export values of this rank as Ray metrics ``phalanx_{what}_{name}``; see ``WorkerContext.measure``."""
        metrics.show(what, rank, values)

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        try:
            return unpacked(private.get(list(refs)))
        except RayTaskError as error:
            if isinstance(error.cause, RankFailure):
                raise error.cause from None
            raise
        except (ObjectLostError, RayActorError) as error:
            said = next(iter(str(error).splitlines()), "")
            raise ArgumentLost(LOST_ARGUMENT + said) from None


def _started_with(name: str) -> str | None:
    """Return an environment variable as of this process's start: Ray changes the thread count for actors later."""
    # Suppressed errors: no /proc, or no such variable.
    with contextlib.suppress(OSError, IndexError), open("/proc/self/environ", "rb") as file:
        text = b"\0" + file.read()
        return text.split(f"\0{name}=".encode(), 1)[1].split(b"\0", 1)[0].decode(errors="replace") or None
    return None


def _message(data: bytes = b"", refs: Sequence[Any] = ()) -> Message:
    """Return the message of this task. Without data, the part of the task's name after the class is the message."""
    return Message("", data, tuple(refs)) if data else _named_message(private.task_name())


@functools.lru_cache(maxsize=4096)
def _named_message(task: str) -> Message:
    return Message(task.partition(".")[2])


def _packed(output: Value) -> Value:
    """Return a small output as bytes, which Ray passes on without pickling them; other outputs as they are."""
    if type(output) is tuple:  # (description, output)
        return output[0], _packed(output[1])
    if isinstance(output, Encoded):
        is_small = output.nbytes <= _PACKED_BYTES
    else:
        is_small = isinstance(output, _ATOMS) or (isinstance(output, str) and len(output) <= _PACKED_BYTES)
    return _MARK + pickle.dumps(output, pickle.HIGHEST_PROTOCOL) if is_small else output


def unpacked(values: Sequence[Value]) -> list[Value]:
    """Return values from Ray, with packed outputs decoded."""
    return [
        pickle.loads(memoryview(value)[len(_MARK) :])
        if isinstance(value, bytes) and value.startswith(_MARK)
        else value
        for value in values
    ]


class _Actor:
    """Base class of worker actors: creates the worker runtime, and forwards calls to it."""

    _px_host: Any  # on the class, for class methods: a process has a single actor

    def __init__(self, factory: RuntimeFactory) -> None:
        self._services = RayServices()
        self._runtime = type(self)._px_host = factory(self._services)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's object, for functions that are sent with ``handle.__ray_call__``.

        Raises:
            AttributeError: if the object has no such attribute or does not exist yet, or the group has roles.
        """
        runtime = self.__dict__.get("_runtime")
        worker = None if runtime is None or name.startswith("__") else runtime.instances.get("")
        if worker is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(worker, name)

    def _px_report(self) -> ProcessInfo:
        return self._runtime.report()

    def _px_setup(self, data: bytes, refs: Sequence[Any] = ()) -> None:
        self._runtime.setup(data, refs)


class WorkerActor(_Actor):
    """Actor that runs a single call at a time.

    Calls without arguments are sent to a class method without parameters. For an instance method Ray adds a hidden
    parameter for its own tracing, binds parameters on both sides, and calls another function. This costs a tenth of the
    time of an empty call, on the driver and on a rank.
    """

    def _px_call(self, data: bytes, refs: Sequence[Any] = ()) -> Value:
        return _packed(self._runtime.run(_message(data, refs)))

    @classmethod
    def _px_named_call(cls) -> Value:
        return _packed(cls._px_host.run(_message()))

    def _px_stream(self, data: bytes = b"", refs: Sequence[Any] = ()) -> Generator[Value]:
        with contextlib.closing(self._runtime.stream(_message(data, refs))) as items:
            for item in items:
                yield _packed(item)


async def _there(refs: list[Any]) -> None:
    """Wait until all values exist on any node, without fetching them. An error counts as a value.

    Waits on its own thread: calls that wait in the few threads of the loop could block the call that they wait for.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def wait() -> None:
        with contextlib.suppress(Exception):  # the call gets the error when it fetches the values
            private.wait(refs, num_returns=len(refs), fetch_local=False)
        with contextlib.suppress(RuntimeError):  # the loop was closed, because the process ends
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

    threading.Thread(target=wait, name="phalanx-arguments", daemon=True).start()
    await done


class AsyncWorkerActor(_Actor):
    """Actor of a group with ``max_concurrency``: constructor and methods share the actor's event loop.

    It begins each call once the call's arguments exist, otherwise in order of arrival. An argument may be the result of
    an earlier call on this group. If the event loop fetched it too early, the earlier calls of this rank could neither
    continue nor deliver their outcomes, for which other ranks wait. A call never waits for the arguments of another
    call: Ray delivers calls of asynchronous actors in any order, so these arguments may depend on the result of the
    waiting call.
    """

    def __init__(self, factory: RuntimeFactory) -> None:
        super().__init__(factory)
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")  # it gets only values that exist
        self._turn = asyncio.Lock()  # first come, first served

    async def _px_come(self, refs: Sequence[Any]) -> None:
        """Wait for the caller's turn. The next turn begins after the caller's first ``await``."""
        if refs:
            await _there(list(dict.fromkeys(refs)))
        async with self._turn:
            # Ray delivers the outcome of a finished call in the loop's next iteration: before this call can block.
            await asyncio.sleep(0)

    async def _px_call(self, data: bytes, refs: Sequence[Any] = ()) -> Value:
        await self._px_come(refs)
        return _packed(await self._runtime.run_async(_message(data, refs)))

    async def _px_named_call(self) -> Value:
        await self._px_come(())
        return _packed(await self._runtime.run_async(_message()))

    async def _px_stream(self, data: bytes = b"", refs: Sequence[Any] = ()) -> AsyncGenerator[Value]:
        await self._px_come(refs)
        async with contextlib.aclosing(self._runtime.stream_async(_message(data, refs))) as items:
            async for item in items:
                yield _packed(item)


_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, ray.ObjectRef, ActorHandle)


#: Types that Ray pickles itself, because it counts the holders of their objects.
_RAYS_OWN: dict[type, Callable[[Any], Any]] = dict.fromkeys((ray.ObjectRef, ActorHandle), lambda value: value)


def portable(value: Value) -> Value:
    """Return ``value`` encoded for Ray: tensors out of band, and views without the rest of their storage.

    The receiver gets the decoded value, in its own memory.
    """
    return value if type(value) in _AS_THEY_ARE else encode(value, externalize=_RAYS_OWN)


def _forward(facade: Facade, class_name: str, asynchronous: bool) -> Callable[..., Any]:
    """Return the actor's method for calls without a group."""
    name, role, method = facade

    async def forward_async(self: AsyncWorkerActor, *args: Value, **kwargs: Value) -> Value:
        traced = kwargs.pop(TRACED, NOT_TRACED)
        await self._px_come(self._services.upstream(args, kwargs))
        return await self._runtime.run_direct_async(role, method, args, kwargs, traced, portable)

    def forward(self: WorkerActor, *args: Value, **kwargs: Value) -> Value:
        traced = kwargs.pop(TRACED, NOT_TRACED)
        return self._runtime.run_direct(role, method, args, kwargs, traced, portable)

    chosen = forward_async if asynchronous else forward
    chosen.__name__ = name
    chosen.__qualname__ = f"{class_name}.{name}"
    return chosen


@functools.lru_cache(maxsize=256)
def actor_class(class_name: str, methods: tuple[Facade, ...], asynchronous: bool) -> Value:
    """Return the Ray actor class for a user's class. It is cached, so a second group does not export it again."""
    base = AsyncWorkerActor if asynchronous else WorkerActor
    facades = {facade.name: _forward(facade, class_name, asynchronous) for facade in methods}
    return ray.remote(type(class_name, (base,), facades))
