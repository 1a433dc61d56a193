"""The host of a worker process: it makes the user's objects and runs calls on them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from phalanx.declare.worker import WorkerContext, make
from phalanx.errors import DispatchError
from phalanx.execution import rendezvous
from phalanx.execution.arguments import Arguments
from phalanx.execution.bootstrap import apply
from phalanx.execution.control import Control, Interrupted, control
from phalanx.execution.guard import Guard
from phalanx.execution.hooks import Hooks, Seen
from phalanx.execution.imports import importing
from phalanx.execution.journals import Journals, size_of
from phalanx.execution.loops import Loop
from phalanx.execution.results import PLAIN, described, encoded
from phalanx.topology.slots import SlotFacts
from phalanx.tracing.journal import Noted
from phalanx.wire.arrival import received
from phalanx.wire.board import BARE_CALL, SETUP_CALL
from phalanx.wire.codec import decode, decoding
from phalanx.wire.failure import RankFailure, capture
from phalanx.wire.messages import HALVED, HOST, OUTPUT, RUN, Facts, RankCall, RankSetup
from phalanx.wire.names import full_name

_REMEMBERED = 256
#: What ends a call and not the process; a method's own task may have been cancelled.
_RAISED = (Exception, Interrupted, asyncio.CancelledError)
_NOWHERE: AbstractContextManager[None] = nullcontext()


class Services(Protocol):
    """What a transport offers to the host in its process."""

    @property
    def in_driver(self) -> bool:
        """Whether the ranks share the driver's process (and so its environment and its event loop)."""
        ...

    def facts(self) -> tuple[SlotFacts, tuple[str, ...], str]:
        """Where this process runs, its log files and the backend's name of it."""
        ...

    def folder(self) -> str:
        """Where this process may keep files of its own, on its node; made when it is first written to."""
        ...

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """The values behind the transport's references."""
        ...


class Host:
    """Owns the instances of one rank, by role; the role "" is a group of a single class."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._socket: socket.socket | None = None
        self._setup: RankSetup | None = None
        self._instances: dict[str, Any] = {}
        self._context = WorkerContext()
        self._loop = Loop()
        self._control: Control | None = None
        self._log: str | None = None
        self.hooks = Hooks()
        #: The calls that ran in debug mode, in their order: number and name.
        self.order: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        #: What a detached group leaves for drivers to come.
        self.record: bytes | None = None
        self._journals = Journals(own_process=not services.in_driver)

    def report(self) -> Facts:
        """What this process is, before it has a rank. Binds the socket on which rank 0 will serve the store."""
        slot, log_paths, worker_id = self._services.facts()
        port, side = 0, None
        if not self._services.in_driver:
            self._control = control()
            side = self._control.describe() if self._control else None
            self._socket = rendezvous.listening_socket(slot.node_ip)
            port = self._socket.getsockname()[1]
        folder = self._services.folder()
        return Facts(slot, os.getpid(), time.time(), port, log_paths, worker_id, side, folder)

    def setup(self, data: bytes, refs: Sequence[Any]) -> None:
        """Become a rank: environment first, then the classes (which may import torch), then the instances."""
        setup, body = RankSetup.unpack(data)
        self._setup = setup
        try:
            self._log = apply(setup, self._services.in_driver)
            self._rendezvous(setup)
            arguments = Arguments(refs, self._services.fetch)
            self._journals.files = setup.files
            with (
                self._journals.of(setup.trace, SETUP_CALL) as note,
                self._during(SETUP_CALL, "", "__init__"),
            ):
                quietly = _NOWHERE if self._services.in_driver else importing()
                with quietly, decoding(restore=arguments.restore):
                    roles = decode(body) if body is not None else self._services.fetch([refs[-1]])[0]
                if note is not None:
                    note.started(0)
                self._make(setup, roles)
        except _RAISED as error:
            raise self._failure(error, "", "__init__") from None

    def _rendezvous(self, setup: RankSetup) -> None:
        rendezvous.install()
        listening, self._socket = self._socket, None
        if listening is not None:
            if setup.rank == 0:
                rendezvous.serve(listening)
            else:
                listening.close()

    def _make(self, setup: RankSetup, roles: dict[str, tuple[type, tuple[Any, ...], dict[str, Any]]]) -> None:
        shared = WorkerContext(
            rank=setup.rank,
            world_size=setup.world_size,
            local_rank=setup.local_rank,
            local_world_size=setup.local_world_size,
            group=setup.group,
            epoch=setup.epoch,
            host=setup.host,
            node_id=setup.node_id,
            accelerator_ids=setup.accelerator_ids,
            device_type=setup.device_type,
            local_device=setup.local_device,
            meshes=setup.meshes,
        )
        self._context = shared
        for role, (cls, args, kwargs) in roles.items():
            instance = make(cls, args, kwargs, replace(shared, role=role))
            self._instances[role] = instance
            shared.roles.add(role, instance)

    def run(self, data: bytes, refs: Sequence[Any] = ()) -> Any:
        """Run one call to its end on this thread; an ``async def`` method on the host's own loop.

        Raises:
            RankFailure: whatever the call raised, always picklable.
        """
        call = RankCall.unpack(data)
        try:
            with self._noted(call, refs) as note, self._during(call.call, call.role, call.method):
                guard = Guard() if call.debug else None
                result = self._invoke(call, refs, guard, note)
                if isinstance(result, Awaitable):
                    result = self._loop.to_end(result)
                return self._outgoing(call, result, guard, note)
        except _RAISED as error:
            raise self._failure(error, call.role, call.method) from None

    def run_bare(self, role: str, method: str) -> Any:
        """Run a call that came without a message: no arguments, its output kept.

        Raises:
            RankFailure: whatever the call raised.
        """
        board = None if self._control is None else self._control.board
        slot = board.begin(BARE_CALL, full_name(role, method)) if board is not None else 0
        if self._journals.on:
            self._journals.off()
        try:
            function = getattr(self._target(role), method)
            bare = Seen(role, method, lambda: ((), {})) if self.hooks else None
            result = function() if bare is None else self.hooks.around(bare, function, (), {})
            if type(result) in PLAIN:  # as `encoded` would; asked first, since it is the quickest question
                return result
            return encoded(self._loop.to_end(result) if isinstance(result, Awaitable) else result)
        except _RAISED as error:
            raise self._failure(error, role, method) from None
        finally:
            if board is not None:
                board.end(slot)

    def _noted(self, call: RankCall, refs: Sequence[Any]) -> AbstractContextManager[Noted | None]:
        return self._journals.of(call.trace, call.call, waits=bool(refs))

    def _during(self, call: int, role: str, method: str) -> AbstractContextManager[None]:
        if self._control is None:
            return _NOWHERE
        return self._control.call(call, full_name(role, method))

    async def run_async(self, data: bytes, refs: Sequence[Any] = ()) -> Any:
        """As :meth:`run`, on the running loop: awaits of several calls interleave."""
        call = RankCall.unpack(data)
        try:
            name = full_name(call.role, call.method)
            during = self._control.task(call.call, name) if self._control else _NOWHERE
            with self._noted(call, refs) as note, during:
                guard = Guard() if call.debug else None
                result = self._invoke(call, refs, guard, note)
                if isinstance(result, Awaitable):
                    result = await result
                return self._outgoing(call, result, guard, note)
        except _RAISED as error:
            raise self._failure(error, call.role, call.method) from None

    def run_plain(self, role: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method with plain arguments, for handles that are used without a group.

        Raises:
            What the method raises, as it is: the backend's own errors are what such a caller expects.
        """
        slot = self._begin(role, method)
        try:
            result = self._plainly(role, method, args, kwargs)
            return self._loop.to_end(result) if isinstance(result, Awaitable) else result
        finally:
            self._end(slot)

    async def run_plain_async(
        self, role: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """As :meth:`run_plain`, on the running loop."""
        slot = self._begin(role, method)
        try:
            result = self._plainly(role, method, args, kwargs)
            return await result if isinstance(result, Awaitable) else result
        finally:
            self._end(slot)

    def _begin(self, role: str, method: str) -> int:
        """Note that a call without a number has begun; what to give to :meth:`_end`."""
        if self._control is None:
            return 0
        return self._control.board.begin(BARE_CALL, full_name(role, method))

    def _end(self, slot: int) -> None:
        if self._control is not None:
            self._control.board.end(slot)

    def _plainly(self, role: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if role not in self._instances:
            raise DispatchError(
                f"{method}() was called on a worker process in which {role or 'the worker'} was not made, or was "
                "closed; call it once the group has started and before it is closed"
            )
        return getattr(self._instances[role], method)(*args, **kwargs)

    def _invoke(self, call: RankCall, refs: Sequence[Any], guard: Guard | None, note: Noted | None) -> Any:
        if call.debug and call.method != HOST:
            self.order.append((call.call, full_name(call.role, call.method)))
        device = None
        if call.to_device:
            device = device_of(self._context)
        shared = guard.views if guard else None
        before = received.nbytes
        args, kwargs = Arguments(refs, self._services.fetch).of(call, device, shared)
        if note is not None:
            note.started(received.nbytes - before)
        if call.method == RUN:
            function, *rest = args
            target = self._target(call.role)
            if self.hooks:
                return self._hooked(call, refs, device, function, (target, *rest), kwargs)
            return function(target, *rest, **kwargs)
        if call.method == HOST:
            return args[0](self, *args[1:], **kwargs)
        method = getattr(self._target(call.role), call.method)
        if guard is not None:
            guard.seal(method, args, kwargs)
        if self.hooks:
            return self._hooked(call, refs, device, method, args, kwargs)
        return method(*args, **kwargs)

    def _hooked(
        self,
        call: RankCall,
        refs: Sequence[Any],
        device: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        def again() -> tuple[tuple[Any, ...], dict[str, Any]]:
            return Arguments(refs, self._services.fetch).of(call, device)

        seen = Seen(call.role, call.method, again, to_device=call.to_device)
        return self.hooks.around(seen, function, args, kwargs)

    @property
    def place(self) -> RankSetup | None:
        """What this rank was told of itself; None before it is a rank."""
        return self._setup

    @property
    def context(self) -> WorkerContext:
        """What the users' objects of this rank share."""
        return self._context

    @property
    def instances(self) -> dict[str, Any]:
        """The users' objects by role."""
        return self._instances

    def _target(self, role: str) -> Any:
        """The instance of a role; of a colocated group as a whole, its roles by name."""
        if role in self._instances:
            return self._instances[role]
        return self._context.roles

    def _outgoing(self, call: RankCall, result: Any, guard: Guard | None, note: Noted | None) -> Any:
        """What the process gives back: plain small things as they are, all else encoded, dropped ones not at all."""
        if note is not None:
            note.finished()
        if guard is not None:
            guard.check(call.method, self._setup.rank if self._setup else -1)
        if not call.keep:
            result = None
        sent_back = (
            described(result, halves=call.returns == HALVED) if call.returns > OUTPUT else encoded(result)
        )
        if note is not None:
            note.returned(size_of(sent_back))
        return sent_back

    def close(self) -> None:
        """The user's own ``close()`` of each role, last made first; errors are reported after all had their turn."""
        errors: list[Exception] = []
        for instance in reversed(list(self._instances.values())):
            close = getattr(instance, "close", None)
            if callable(close):
                try:
                    result = close()
                    if isinstance(result, Awaitable):
                        self._loop.to_end(result)
                except Exception as error:
                    errors.append(error)
        self._instances.clear()
        if errors:
            raise errors[0]

    def _failure(self, error: BaseException, role: str, method: str) -> RankFailure:
        if isinstance(error, RankFailure):  # an upstream future failed: its own report names the source
            error = DispatchError(f"an argument of this call is the result of a call that failed: {error}")
        setup = self._setup
        return capture(
            error,
            kind="cancelled" if isinstance(error, Interrupted) else "raised",
            rank=setup.rank if setup else -1,
            role=role or None,
            method=method,
            host=setup.host if setup else socket.gethostname(),
            pid=os.getpid(),
            accelerator=_accelerator(setup),
            node_id=setup.node_id if setup else None,
            log_path=self._log,
        )


def device_of(context: WorkerContext) -> Any:
    """The device of the worker of this context, as ``Worker.device`` gives it."""
    from phalanx.declare.worker import Worker

    worker = Worker()
    worker.__dict__["_phalanx_context"] = context
    return worker.device


def _accelerator(setup: RankSetup | None) -> str | None:
    if setup is None or not setup.accelerator_ids:
        return None
    return f"GPU {','.join(setup.accelerator_ids)}"
