"""The host of a worker process: it makes the user's objects and runs calls on them."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.declare.context import WorkerContext, context_of, set_context_of_process
from phalanx.declare.weight_declarations import WeightsDeclared
from phalanx.declare.worker import REJOINING, Worker, make
from phalanx.errors import FailureKind, StaleEpoch
from phalanx.topology.mesh import Mesh
from phalanx.tracing.span_writer import Noted
from phalanx.weights.weight_registry import WeightRegistry
from phalanx.wire.call_page import BARE_CALLS, SETUP_CALL
from phalanx.wire.codec import decode, decoding
from phalanx.wire.decode_options import received
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import ANY_EPOCH, RUN, ProcessInfo, RankCall, RankConfig, is_library_call
from phalanx.wire.method_names import full_name
from phalanx.wire.outputs import OUTPUT, BackendRef
from phalanx.worker.admission import Admission
from phalanx.worker.async_runner import Loop, Way, at_once
from phalanx.worker.bootstrap import apply, context_of_rank
from phalanx.worker.call_arguments import Arguments
from phalanx.worker.control import Interrupted, control
from phalanx.worker.direct_actor_calls import PlainCalls
from phalanx.worker.exit_hooks import Closers, report
from phalanx.worker.hooks import Hooks, Seen
from phalanx.worker.imports import importing
from phalanx.worker.raised_failures import failed
from phalanx.worker.rank_context import NOWHERE, Presence
from phalanx.worker.rendezvous import StorePort
from phalanx.worker.results import PLAIN, described, encoded
from phalanx.worker.runtime_services import Services
from phalanx.worker.span_writers import Journals, size_of
from phalanx.worker.worker_streams import GENERATORS, collected, one_by_one, streamed

_REMEMBERED = 256


class WorkerRuntime:
    """Owns the instances of one rank, by role; the role "" is a group of a single class."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._store_port = StorePort()
        self._setup: RankConfig | None = None
        self._instances: dict[str, Any] = {}
        self._loop = Loop()
        self._log: str | None = None
        self.hooks = Hooks()
        #: The calls that ran in debug mode, in their order: number and name.
        self.order: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        #: What a detached group leaves for drivers to come.
        self.record: bytes | None = None
        self.journals = Journals(own_process=not services.in_driver)
        self._bare_calls = 0
        self._weights: WeightRegistry | None = None
        self.closers = Closers(own_process=not services.in_driver)
        self._presence = Presence(self.closers, self._loop, in_driver=services.in_driver)
        self._here, self._on_loop = self._presence.here, self._presence.on_loop
        self._admission = Admission(self._instances)
        #: Of handles that are used without a group.
        self.plain = PlainCalls(self._instances, self.journals, self._loop, self._presence)
        if services.in_driver:
            self.run_bare = self._run_bare_in_driver

    @property
    def weights(self) -> WeightRegistry:
        """What this rank publishes and accepts."""
        if self._weights is None:
            setup = self._setup
            had, published = (setup.had_weights, setup.published_weights) if setup else ({}, {})
            self._weights = WeightRegistry(WeightsDeclared.of(self.context), had, published)
            self._admission.unusable = self._weights.unusable
        return self._weights

    def put(self, value: Any) -> BackendRef:
        """Store a value with the backend; a reference to it, which an output may hold, and other ranks can fetch."""
        return BackendRef(self._services.put(value))

    def fetch(self, ref: BackendRef, timeout: float) -> Any:
        """The value behind a reference.

        Raises:
            TimeoutError: it is not here within ``timeout`` seconds.
            Exception: what the backend raises where the value is gone.
        """
        return self._services.fetch([ref.ref], timeout)[0]

    def report(self) -> ProcessInfo:
        """What this process is, before it has a rank. Binds the socket on which rank 0 will serve the store."""
        slot, log_paths = self._services.facts()
        port, side, folder = 0, None, self._services.folder()
        if not self._services.in_driver:
            self._presence.control = channel = control()
            side = channel.describe() if channel else None
            port = self._store_port.take(slot.node_ip)
        return ProcessInfo(slot, os.getpid(), time.time(), port, log_paths, side, folder)

    def setup(self, data: bytes, refs: Sequence[Any]) -> tuple[float, float]:
        """Become a rank: environment first, then the classes (which may import torch), then the instances.

        Returns:
            When the constructors began and ended, as Unix times.
        """
        setup, body = RankConfig.unpack(data)
        self._setup = setup
        self._admission.enter(setup.group, setup.epoch)
        self.closers.place = f"rank {setup.rank} of group {setup.group!r}"
        self._presence.runs_here()
        try:
            self._log = apply(setup, self._services.in_driver)
            self._store_port.settle(serves=setup.serves)
            arguments = Arguments(refs, self._services.fetch)
            self.journals.files = setup.files
            with (
                self.journals.of(setup.trace, SETUP_CALL) as note,
                self._here.during(SETUP_CALL, "__init__"),
            ):
                quietly = NOWHERE if self._services.in_driver else importing()
                with quietly, decoding(restore=arguments.restore):
                    roles = decode(body) if body is not None else self._services.fetch([refs[-1]])[0]
                if note is not None:
                    note.started(0)
                began = time.time()
                self._make(setup, roles)
                return began, time.time()
        except self._here.passes:
            raise
        except BaseException as error:
            raise self.failure(error, "", "__init__") from None

    def _make(
        self, setup: RankConfig, roles: dict[str, tuple[type, tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        shared = context_of_rank(setup, self._services.in_driver)
        channel = self._presence.control
        shared.tell = None if channel is None else channel.page.tell
        shared.measure = getattr(self._services, "measure", None)
        self._presence.context = shared
        if not self._services.in_driver:
            set_context_of_process(shared)
        if setup.had_weights:
            self._admission.unusable = self.weights.unusable
        for role, (cls, args, kwargs) in roles.items():
            instance = make(cls, args, kwargs, replace(shared, role=role))
            self._instances[role] = instance
            shared.roles.add(role, instance)
        shared.shared[REJOINING] = False

    def run(self, data: bytes, refs: Sequence[Any] = ()) -> Any:
        """Run one call to its end on this thread; an ``async def`` method on the host's own loop.

        Raises:
            RankFailure: whatever the call raised, always picklable.
        """
        return at_once(self._run(RankCall.unpack(data), refs, self._here))

    async def run_async(self, data: bytes, refs: Sequence[Any] = ()) -> Any:
        """As :meth:`run`, on the running loop: awaits of several calls interleave."""
        return await self._run(RankCall.unpack(data), refs, self._on_loop)

    def stream(self, data: bytes, refs: Sequence[Any] = ()) -> Generator[Any]:
        """Run one call whose method yields, as far as the next item whenever that is asked for; last a ``StreamEnd``.

        Closing it before it has ended interrupts the call.

        Raises:
            RankFailure: whatever the call raised, or that it was interrupted.
        """
        return one_by_one(self.stream_async(data, refs, self._here))

    def stream_async(
        self, data: bytes, refs: Sequence[Any] = (), way: Way | None = None
    ) -> AsyncGenerator[Any]:
        """As :meth:`stream`, on the running loop."""
        return streamed(self, RankCall.unpack(data), refs, way or self._on_loop)

    async def _run(self, call: RankCall, refs: Sequence[Any], way: Way) -> Any:
        self.check_callable(call)
        try:
            noted = self.journals.of(call.trace, call.call, waits=bool(refs))
            with noted as note, way.during(call.call, full_name(call.role, call.method)):
                result = self.invoke(call, refs, note)
                if isinstance(result, Awaitable):
                    result = await way.end(result)
                if type(result) in GENERATORS:
                    result = await collected(result, way.end, keep=call.keep)
                return self._outgoing(call, result, note)
        except way.passes:
            raise
        except BaseException as error:
            raise self.failure(error, call.role, call.method) from None

    def run_bare(self, role: str, method: str) -> Any:
        """Run a call that came without a message: no arguments, its output kept.

        Raises:
            RankFailure: whatever the call raised.
        """
        control, self._bare_calls = self._presence.control, self._bare_calls + 1
        number = BARE_CALLS + self._bare_calls
        if self._admission.unusable and (torn := self._admission.torn(role, method)) is not None:
            raise self.failure(torn, role, method)
        slot = 0 if control is None else control.page.begin(number, full_name(role, method))
        if self.journals.on:
            self.journals.off()
        try:
            if control is not None:
                # Before the question: a cancellation meanwhile finds one or the other.
                control.running = number
                if control.page.cancelled(number):
                    raise Interrupted("cancelled before it began")
            function = getattr(self._target(role), method)
            bare = Seen(role, method) if self.hooks else None
            result = function() if bare is None else self.hooks.around(bare, function, (), {})
            if type(result) in PLAIN:  # as `encoded` would; asked first, since it is the quickest question
                return result
            return encoded(self._loop.to_end(result) if isinstance(result, Awaitable) else result)
        except self._here.passes:
            raise
        except BaseException as error:
            if control is not None:
                control.running = 0  # what failed is described undisturbed
            raise self.failure(error, role, method) from None
        finally:
            if control is not None:
                control.running = 0
                control.page.end(slot)

    def _run_bare_in_driver(self, role: str, method: str) -> Any:
        with self._presence.now():
            return WorkerRuntime.run_bare(self, role, method)

    def enter_epoch(self, number: int) -> None:
        """Belong to another epoch from now on, in the process that this rank has.

        A call without a message says nothing of its epoch, so none is taken any more: whoever knows of this epoch
        sends a message.
        """
        self._admission.enter(self.context.group, number)
        self.run_bare = self._refuse_bare

    def follow(self, number: int, world_size: int, meshes: Mapping[str, Mesh]) -> None:
        """Be one of so many ranks from now on; those work each by itself, so calls of any epoch are taken."""
        self._admission.enter(self.context.group, number)
        for context in (self.context, *map(context_of, self._instances.values())):
            context.epoch, context.world_size, context.meshes = number, world_size, dict(meshes)
        if not self._services.in_driver:
            os.environ["WORLD_SIZE"] = str(world_size)

    def leave(self) -> None:
        """Take no more calls of users, and hand over at the end what is of use to others."""
        self._admission.leaves = self.closers.hands_over = True

    def stay(self, number: int) -> None:
        """Belong to another epoch from now on, and go on with calls without a message."""
        self._admission.enter(self.context.group, number)

    def at_end(self, result: Any) -> Any:
        """What a function of the user gave, once it is there."""
        return self._loop.to_end(result) if isinstance(result, Awaitable) else result

    @property
    def in_driver(self) -> bool:
        """Whether it shares the driver's process."""
        return self._services.in_driver

    def check_callable(self, call: RankCall) -> None:
        """See to it that this rank may run a call: it is of its epoch, and its role has weights of one version.

        Raises:
            RankFailure: it may not.
        """
        refused = self._admission.refusal(call)
        if refused is not None:
            kind: FailureKind = "stale" if isinstance(refused, StaleEpoch) else "raised"
            raise self.failure(refused, call.role, call.method, kind)

    def _refuse_bare(self, role: str, method: str) -> Any:
        raise self.failure(self._admission.stale(role, method, ANY_EPOCH), role, method, "stale")

    def invoke(self, call: RankCall, refs: Sequence[Any], note: Noted | None) -> Any:
        """Call the method of a call with its arguments; what it returns."""
        if call.debug and not is_library_call(call.method):
            self.order.append((call.call, full_name(call.role, call.method)))
        device = self.device if call.to_device else None
        before = received.nbytes
        args, kwargs = Arguments(refs, self._services.fetch).of(call, device)
        if note is not None:
            note.started(received.nbytes - before)
        if call.method == RUN:
            function, *rest = args
            target = self._target(call.role)
            if self.hooks:
                return self.hooks.around(Seen(call.role, call.method), function, (target, *rest), kwargs)
            return function(target, *rest, **kwargs)
        if is_library_call(call.method):
            return args[0](self, *args[1:], **kwargs)
        method = getattr(self._target(call.role), call.method)
        if self.hooks:
            return self.hooks.around(Seen(call.role, call.method), method, args, kwargs)
        return method(*args, **kwargs)

    def lost(self, why: str) -> None:
        """Note that this rank ended without having been closed, where it has no process of its own to show it."""
        for tell in self.closers.if_lost:
            tell(why)
        self.closers.if_lost.clear()

    @property
    def place(self) -> RankConfig | None:
        """What this rank was told of itself; None before it is a rank."""
        return self._setup

    @property
    def context(self) -> WorkerContext:
        """What the users' objects of this rank share."""
        return self._presence.context

    @property
    def device(self) -> Any:
        """The device of this rank, as ``Worker.device`` gives it."""
        worker = Worker()
        worker.__dict__["_phalanx_context"] = self.context
        return worker.device

    @property
    def instances(self) -> dict[str, Any]:
        """The users' objects by role."""
        return self._instances

    def _target(self, role: str) -> Any:
        """The instance of a role; of a colocated group as a whole, its roles by name."""
        if role in self._instances:
            return self._instances[role]
        return self.context.roles

    def _outgoing(self, call: RankCall, result: Any, note: Noted | None) -> Any:
        """What the process gives back: plain small things as they are, all else encoded, dropped ones not at all."""
        if note is not None:
            note.finished()
        if not call.keep:
            result = None
        sent_back = described(result) if call.returns > OUTPUT else encoded(result)
        if note is not None:
            note.returned(size_of(sent_back))
        return sent_back

    def close(self) -> None:
        """The user's own ``close()`` of each role, last made first, then the closers; all have their turn.

        Raises:
            What the first of them raised.
        """
        errors: list[BaseException] = []
        for instance in reversed(list(self._instances.values())):
            close = getattr(instance, "close", None)
            if callable(close):
                try:
                    result = close()
                    if isinstance(result, Awaitable):
                        self._loop.to_end(result)
                except BaseException as error:
                    report(f"close() of {type(instance).__qualname__}", error)
                    errors.append(error)
        self._instances.clear()
        errors += self.closers.run()
        if errors:
            raise errors[0]

    def failure(
        self, error: BaseException, role: str, method: str, kind: FailureKind = "raised"
    ) -> RankFailure:
        """What a call raises that failed here."""
        return failed(error, self._setup, self._log, role=role, method=method, kind=kind)
