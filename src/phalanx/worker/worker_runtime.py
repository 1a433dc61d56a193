"""The runtime of a worker process: it creates the user's objects and runs calls on them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from threading import get_native_id
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol

from phalanx.collect.call_values import decoded, described, encoded, sent_bytes
from phalanx.declare.classes import registered_methods
from phalanx.declare.context import WorkerContext, present, set_context_of_process
from phalanx.declare.worker import REJOINING, Worker, make
from phalanx.errors import ArgumentLost, DispatchError, FailureKind, InternalError, WeightsTorn
from phalanx.topology.slots import SlotInfo
from phalanx.tracing import spans
from phalanx.tracing.spans import CallSpan, SpanWriter, path_of
from phalanx.weights.versions import WeightRegistry
from phalanx.wire.call_page import SETUP_CALL
from phalanx.wire.exceptions import pack_when_pickled
from phalanx.wire.failure import UNKNOWN_RANK, RankFailure, capture, stale_call
from phalanx.wire.messages import (
    ANY_EPOCH,
    OUTPUT,
    RUN,
    Message,
    ProcessInfo,
    RankCall,
    RankConfig,
    StreamEnd,
    full_name,
    is_library_call,
)
from phalanx.wire.unpack import received
from phalanx.worker.bootstrap import apply, importing
from phalanx.worker.control import Control, Interrupted
from phalanx.worker.exit_hooks import CLOSERS, ExitHooks, report
from phalanx.worker.rendezvous import join_store, listen

_REMEMBERED = 256
_SETTLES_WITHIN_S = 10.0
_OPEN_TRACES = 8
_MODULES = (
    "ranks import modules from the folder of the driver's script, from PYTHONPATH and from what is installed on their "
    "node; a change of sys.path in the driver does not reach them"
)
_NOTHING: AbstractContextManager[None] = nullcontext()
_GENERATORS = (GeneratorType, AsyncGeneratorType)
_OVER = object()


class Services(Protocol):
    """Functions of the backend for the runtime in its process."""

    #: True if the ranks share the driver's process, and so its environment and its event loop.
    in_driver: bool

    def facts(self) -> tuple[SlotInfo, tuple[str, ...], str]:
        """Return the place of this process, its log files, and the folder for its files, which is created when used."""
        ...

    def call_id(self) -> int:
        """Return the id of the call that runs here, by which its sender knows it too."""
        ...

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """Return the values of references."""
        ...


class Loop:
    """The event loop for ``async`` methods of a rank whose process has none, created at their first call.

    It runs awaitables to their end on the calling thread.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, result: Any) -> Any:
        """Return the result of a user's function: that of an awaitable once it is there."""
        if not isinstance(result, Awaitable):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # A rank in the driver's process ends by being dropped; the loop holds sockets.
            weakref.finalize(self, self._loop.close).atexit = False
        task = asyncio.ensure_future(result, loop=self._loop)
        outer = asyncio._get_running_loop()
        if outer is None:
            return _run_until_complete(self._loop, task)
        # A loop runs on this thread: that of a notebook with inline ranks, or the rank's own during rejoin(). Another
        # thread would have other thread-local values, such as the current CUDA device.
        # Python 3.14 has one current task per thread, not per loop, so that task is left, too.
        outer_task = asyncio.current_task(outer)
        if outer_task is not None:
            asyncio.tasks._leave_task(outer, outer_task)
        asyncio._set_running_loop(None)
        try:
            return _run_until_complete(self._loop, task)
        finally:
            asyncio._set_running_loop(outer)
            if outer_task is not None:
                asyncio.tasks._enter_task(outer, outer_task)


class TraceFiles:
    """The trace files of a rank, opened at the first call of each trace.

    ``own_process`` is False if the process is the driver's.
    """

    def __init__(self, own_process: bool) -> None:
        #: Beginning of the paths of the rank's files.
        self.files = ""
        self._own_process = own_process
        self._writer: SpanWriter | None = None
        self._writer_of = lru_cache(maxsize=_OPEN_TRACES)(SpanWriter)

    def of(self, trace: str, number: int) -> AbstractContextManager[CallSpan | None]:
        """Return a context around a call that records it in ``trace``; its value is None if there is no trace."""
        if not trace:
            if spans.process.sink is self._writer:  # not of a trace that this process has started itself
                spans.process.sink = None
            return _NOTHING
        writer = self._writer_of(path_of(self.files, trace))
        if self._own_process:
            spans.process.sink = self._writer = writer
        return CallSpan(writer, number)


class Instances(dict[str, Any]):
    """The users' objects of a rank by role."""

    def __missing__(self, role: str) -> Any:
        raise DispatchError(
            f"a method was called on a worker process in which {role or 'the worker'} was not made, or was closed; "
            "call it once the group has started and before it is closed"
        )


class WorkerRuntime:
    """Owns the objects of a rank by role; the role "" is a group of a single class.

    Attributes:
        in_driver: True if the rank shares the driver's process.
        instances: the users' objects by role.
        context: the context of the rank, shared by its objects; of no rank before :meth:`setup`.
        loop: runs ``async`` functions of users to their end.
        closers: its exit hooks.
        around: given a role and a method, returns a context in which the call runs, such as a profile's; or None.
        call_log: number and name of calls that ran in debug mode or in a trace, in their order.
        trace_files: its trace files.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self.in_driver = services.in_driver
        self.instances = Instances()
        self.context = WorkerContext(rank=UNKNOWN_RANK, epoch=ANY_EPOCH, host=socket.gethostname())
        self.closers = ExitHooks(own_process=not services.in_driver)
        self.around: Callable[[str, str], AbstractContextManager[None]] | None = None
        self.call_log: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self.trace_files = TraceFiles(own_process=not services.in_driver)
        self.loop = Loop()
        self._listening: socket.socket | None = None
        self._control = side = None if services.in_driver else Control()
        #: Returns a context in which a call is shown as running.
        self._listed = side.listed if side else lambda number, method: _NOTHING
        #: Returns a context in which a call, or an item of it, can be interrupted; in the driver's process, a context
        #: in which the calling thread is this rank.
        self._step = side.step if side else lambda number: present(self.context)
        #: True if calls interleave on the process's own loop, since the group has ``max_concurrency``.
        self.interleaves = False
        # Errors that are not failures of the call. In a rank's own process, only a method raises KeyboardInterrupt.
        self._passes = (SystemExit, KeyboardInterrupt) if services.in_driver else (SystemExit,)
        self._log: str | None = None

    # The rank

    def report(self) -> ProcessInfo:
        """Describe this process before it has a rank. Bind the socket on which it may have to serve the store."""
        slot, log_paths, folder = self._services.facts()
        self._listening = None if self.in_driver else listen(slot.node_ip)
        port = 0 if self._listening is None else self._listening.getsockname()[1]
        side = None if self._control is None else self._control.describe()
        return ProcessInfo(slot, os.getpid(), time.time(), port, log_paths, side, folder)

    def setup(self, data: bytes, refs: Sequence[Any]) -> None:
        """Become a rank: set the environment, import the classes (which may import torch), create the objects."""
        (setup, body), call_id = RankConfig.unpack(data), self._services.call_id()
        self._set_context(setup)
        if self._control and setup.asynchronous:
            self.interleaves = True
            self._passes = (GeneratorExit,)  # SystemExit would end the loop of all calls, but not the process
            self._step = self._control.task_step
        try:
            self._log = None if self.in_driver else apply(setup)
            join_store(self._listening, serves=setup.serves)
            self.trace_files.files = setup.files
            with (
                self.trace_files.of(setup.trace, SETUP_CALL) as note,
                self._listed(call_id, "__init__"),
                self._step(call_id),
            ):
                with nullcontext() if self.in_driver else importing():
                    roles = decoded(body, refs, self._services.fetch)
                if note is not None:
                    note.started(0)
                for role, (cls, args, kwargs) in roles.items():
                    made = make(cls, args, kwargs, replace(self.context, role=role))
                    self.instances[role] = self.context.roles[role] = made
                self.context.shared[REJOINING] = False
        except self._passes:
            raise
        except BaseException as error:
            raise self.failure(error, RankCall(setup.epoch, "", "__init__")) from None

    def _set_context(self, setup: RankConfig) -> None:
        self.context = context = WorkerContext(
            **vars(setup),
            in_driver=self.in_driver,
            measure=getattr(self._services, "measure", None),
            shared={CLOSERS: self.closers, REJOINING: setup.rejoining},
        )
        if self._control is not None:
            context.tell = self._control.page.tell
            self._control.page.runs_on(get_native_id())
            set_context_of_process(context)

    @cached_property
    def weights(self) -> WeightRegistry:
        """Its published and accepted weights, and the reasons why methods of a role may not run on them."""
        return WeightRegistry(self.context)

    @property
    def device(self) -> Any:
        """The device of this rank; see ``Worker.device``."""
        return make(Worker, (), {}, self.context).device

    def lost(self, reason: str) -> None:
        """Call the functions that wait for the end of this rank, which has no process whose end would show it."""
        for callback in self.closers.if_lost:
            callback(reason)
        self.closers.if_lost.clear()

    def close(self) -> Coroutine[Any, Any, None] | None:
        """Run the users' ``close()`` of each role, last created first, then the exit hooks.

        A rank with an event loop of its own returns the coroutine for it.

        Raises:
            BaseException: if any of them raised: the first error, once all have run.
        """
        return self._close() if self.interleaves else _completed(self._close())

    async def _close(self) -> None:
        errors: list[BaseException] = []
        for instance in reversed(list(self.instances.values())):
            close = getattr(instance, "close", None)
            if callable(close):
                try:
                    await self._value(close())
                except BaseException as error:
                    report(f"close() of {type(instance).__qualname__}", error)
                    errors.append(error)
        self.instances.clear()
        errors += self.closers.run()
        if errors:
            raise errors[0]

    # Calls. Each is a coroutine: on a synchronous rank it never suspends, since awaitables of users run to their end on
    # the rank's own loop.

    def run(self, message: Message) -> Any:
        """Run a call to its end on this thread; an ``async def`` method on the rank's own loop.

        Raises:
            RankFailure: for every error of the call; always picklable.
        """
        return _completed(self.run_async(message))

    async def run_async(self, message: Message) -> Any:
        """Run a call on the running loop, as :meth:`run`: awaits of several calls interleave."""
        call, refs, call_id = message.unpack(), message.refs, self._services.call_id()
        self._check(call)
        try:
            with (
                self.trace_files.of(call.trace, call.number) as note,
                self._listed(call_id, full_name(call.role, call.method)),
                self._step(call_id),
            ):
                function, args, kwargs = self._method(call, refs, note)
                with self.around(call.role, call.method) if self.around else _NOTHING:
                    result = function(*args, **kwargs)
                    if isinstance(result, Awaitable):
                        result = await self._value(result)
                    if type(result) in _GENERATORS:
                        result = [item async for item in self._items(result) if call.keep]
                if self.closers.before_result:
                    await self._before_result()
                result = result if call.keep else None
                pack = described if call.returns > OUTPUT else encoded
                return pack(result) if note is None else _noted(result, note, pack)
        except self._passes:
            raise
        except BaseException as error:
            raise self.failure(error, call) from None

    def stream(self, message: Message) -> Generator[Any]:
        """Run a call whose method yields, up to the next item at each request; the last item is a ``StreamEnd``.

        Closing the generator before its end interrupts the call. An interrupted call yields its failure as the last
        item instead of raising it, because there may be no reader left.

        Raises:
            RankFailure: for every other error of the call.
        """
        items = self.stream_async(message)
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield _completed(anext(items))
        finally:
            _completed(items.aclose())

    async def stream_async(self, message: Message) -> AsyncGenerator[Any]:
        """Run a call whose method yields on the running loop, as :meth:`stream`."""
        call, refs, call_id = message.unpack(), message.refs, self._services.call_id()
        self._check(call)
        count = nbytes = 0
        try:
            with (
                self.trace_files.of(call.trace, call.number) as note,
                self._listed(call_id, full_name(call.role, call.method)),
            ):
                with self._step(call_id):
                    function, args, kwargs = self._method(call, refs, note)
                with self.around(call.role, call.method) if self.around else _NOTHING:
                    with self._step(call_id):
                        source = _check_yields(await self._value(function(*args, **kwargs)))
                    async with aclosing(self._items(source)) as items:
                        while True:
                            with self._step(call_id):
                                item = await anext(items, _OVER)
                                sent = None if item is _OVER else encoded(item)
                            if item is _OVER:
                                break
                            count += 1
                            nbytes += sent_bytes(sent)
                            yield sent
                if note is not None:
                    note.finished()
                    note.result_bytes, note.items = nbytes, count
            await self._before_result()
            end = StreamEnd(count)
        except self._passes:
            raise
        except BaseException as error:
            end = self._stream_failure(call, error)
        yield end

    def _stream_failure(self, call: RankCall, error: BaseException) -> RankFailure:
        """Return the failure of an interrupted stream, and raise any other failure.

        A separate method: in a cycle with the error, the generator's frame would keep the method's objects alive.
        """
        if isinstance(error, GeneratorExit):
            error = Interrupted("its reader left it between two items")
        elif isinstance(error, Interrupted):
            return self.failure(error, call)
        raise self.failure(error, call) from None

    def run_direct(self, *call: Any) -> Any:
        """Run a call of a handle that is used without a group, as :meth:`run_direct_async`."""
        return _completed(self.run_direct_async(*call))

    async def run_direct_async(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        traced: tuple[str, int, int],
        pack: Callable[[Any], Any],
    ) -> Any:
        """Run a call of a handle that is used without a group: plain arguments, and errors as the method raises them.

        Args:
            traced: its trace ("": none), its number there, and the bytes of its arguments.
            pack: converts its result for sending.
        """
        trace, number, nbytes = traced
        listed = self._listed(self._services.call_id(), full_name(role, method))
        with listed, self.trace_files.of(trace, number) as note:
            if note is not None:
                note.started(nbytes)
            worker = self.instances[role]
            try:
                result = await self._value(getattr(worker, method)(*args, **kwargs))
            except Exception as error:
                pack_when_pickled(error)
                raise
            await self._before_result()
            return pack(result) if note is None else _noted(result, note, pack)

    # Steps of a call

    def _check(self, call: RankCall) -> None:
        """Check that a call is of the rank's epoch, and that all weights of its role have the same version.

        Raises:
            RankFailure: if the rank may not run the call.
        """
        if is_library_call(call.method):
            return
        # A call of the owner for any epoch was sent before the rank was asked to leave, though it may arrive later.
        if call.epoch != ANY_EPOCH and (self.closers.leaves or call.epoch != self.context.epoch):
            name = full_name(call.role, call.method)
            stale = stale_call(self.context.group, name, call.epoch, self.context.epoch)
            raise self.failure(stale, call, "stale")
        if self.weights.declared.torn and call.method != RUN:
            reason = self.weights.declared.torn.get(call.role)
            spec = registered_methods(type(self.instances.get(call.role))).get(call.method)
            if reason is not None and (spec is None or spec.needs_weights):
                torn = WeightsTorn(f"{full_name(call.role, call.method)}: {reason}")
                raise self.failure(torn, call)

    async def _before_result(self) -> None:
        waiting = [future for hook in self.closers.before_result if (future := hook()) is not None]
        if waiting and self.interleaves:
            await asyncio.wait([asyncio.wrap_future(future) for future in waiting], timeout=_SETTLES_WITHIN_S)
        elif waiting:
            wait(waiting, _SETTLES_WITHIN_S)

    async def _value(self, result: Any) -> Any:
        """Return the result of a user's function: that of an awaitable once it is there."""
        if self.interleaves and isinstance(result, Awaitable):
            return await result
        return self.loop.run(result)

    async def _items(self, source: Any) -> AsyncGenerator[Any]:
        """Yield the items of a generator of either kind. Closing this closes the generator."""
        plain = isinstance(source, GeneratorType)
        try:
            while True:
                item = next(source, _OVER) if plain else await self._value(anext(source, _OVER))
                if item is _OVER:
                    return
                yield item
        finally:
            await self._value(source.close() if plain else source.aclose())

    def _method(
        self, call: RankCall, refs: Sequence[Any], note: CallSpan | None
    ) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
        """Return the method of a call, and its arguments. Its result may be awaitable, or yield."""
        library = is_library_call(call.method)
        if call.number and not library:
            self.call_log.append((call.number, full_name(call.role, call.method)))
        before = received.nbytes
        device = self.device if call.to_device else None
        args, kwargs = decoded(call.body, refs, self._services.fetch, readonly=call.readonly, device=device)
        if note is not None:
            note.started(received.nbytes - before)
        if library:
            return args[0], (self, *args[1:]), kwargs
        if call.method == RUN:  # a group as a whole has its roles by name
            return args[0], (self.instances.get(call.role, self.context.roles), *args[1:]), kwargs
        return getattr(self.instances[call.role], call.method), args, kwargs

    def failure(self, error: BaseException, call: RankCall, kind: FailureKind = "raised") -> RankFailure:
        """Return ``error`` as the failure of a call in this process.

        If an argument is the result of a call that failed, the failure keeps the type of that call's error, so that
        ``except KeyError`` on the driver catches it here too.
        """
        packed: bytes | None = None
        if isinstance(error, RankFailure):
            from phalanx.collect.failures import is_cut_off  # loaded only if a call failed

            upstream = error.report
            packed = upstream.exception_bytes
            cls = ArgumentLost if upstream.lost or is_cut_off(upstream) else DispatchError
            error = cls(f"an argument of this call is the result of a call that failed: {error}")
        context, accelerators = self.context, ",".join(self.context.accelerator_ids)
        return capture(
            error,
            rank=context.rank,
            kind="cancelled" if isinstance(error, Interrupted) else kind,
            role=call.role or None,
            method=call.method,
            hint=_MODULES if isinstance(error, ModuleNotFoundError) else None,
            host=context.host,
            pid=os.getpid(),
            accelerator=f"GPU {accelerators}" if accelerators else None,
            node_id=context.node_id or None,
            log_path=self._log,
            exception_bytes=packed,
        )


def _completed(coroutine: Any) -> Any:
    """Return the result of a coroutine that does not suspend, such as a call on a rank without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise InternalError(f"{coroutine} was suspended on a rank without an event loop")


def _check_yields(source: Any) -> Any:
    if type(source) not in _GENERATORS:
        raise DispatchError(
            f".stream() expects a method that yields, but this method returned a {type(source).__name__}: call "
            "it without .stream(), or let the method yield"
        )
    return source


def _noted(result: Any, note: CallSpan, pack: Callable[[Any], Any]) -> Any:
    """Return a result as it is sent, noted in the trace."""
    note.finished()
    packed = pack(result)
    note.result_bytes = sent_bytes(packed)
    return packed


def _run_until_complete(loop: asyncio.AbstractEventLoop, task: asyncio.Future[Any]) -> Any:
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if not task.done():  # a signal handler raised: the task would continue during the next call
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(task)
        raise
