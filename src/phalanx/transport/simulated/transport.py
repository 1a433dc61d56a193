"""The simulated backend: the contracts of a transport over a model of a cluster, on a clock of its own.

Of each group one worker is there, or none at all; what its methods cost is stated. Everything above runs as it does on
a real cluster.
"""

from __future__ import annotations

import json
import random
import signal as signals
import time
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.errors import CallCancelled
from phalanx.tracing.events import STARTING
from phalanx.tracing.journal import IN, OUT, RUN, path_of
from phalanx.transport.inline import InlineRank, InlineServices, InlineTransport
from phalanx.transport.inline_values import InlineRef, InlineStream
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.ground import Ground
from phalanx.transport.simulated.machines import Node, make_nodes
from phalanx.transport.simulated.model import Model, SimulatedFault
from phalanx.transport.simulated.placing import Slots
from phalanx.transport.simulated.processes import Process, Value, Work, World
from phalanx.transport.simulated.rank import Answer, StandIn
from phalanx.transport.simulated.refs import SimulatedRef, has_failed, value_of
from phalanx.transport.timed import FOR_EVER, SteppedClock, TimedCalls, TimedRef, at_of, plain
from phalanx.transport.values import Endpoint, Lost, RankStream, Ref, Sight, SpawnRequest, Ticket
from phalanx.wire import value as wire
from phalanx.wire.bundle import Bundle
from phalanx.wire.codec import Encoded
from phalanx.wire.failure import capture
from phalanx.wire.messages import BARE, HOST, Facts, RankCall, RankSetup
from phalanx.wire.outputs import OUTPUT, StreamEnd
from phalanx.wire.side_channel import SETUP_CALL

_FIRST_PID = 100_000


class SimulatedRank(InlineRank):
    """A rank of which only the times are there."""

    def __init__(self, process: Process, stand_in: StandIn) -> None:
        super().__init__(None)
        self.process = process
        self.stand_in = stand_in
        self.rank = -1
        self.under_way: dict[int, tuple[Work, TimedRef]] = {}


class SimulatedTransport(Ground, TimedCalls, InlineTransport):
    """A backend whose ranks are times in a queue of events."""

    name = "simulated"

    def __init__(self, model: Model, costs: Costs | None = None) -> None:
        super().__init__({})
        self.model = model
        self.costs = costs or Costs()
        self.clock = SteppedClock()
        self.messages = 0
        self.message_bytes = 0
        self._began_ns = time.time_ns()
        gpus = model.ranks_per_node if model.accelerators else 0
        nodes = make_nodes(model.nodes, gpus, model.cores, model.seed, model.hours_between_failures)
        driver = Node("driver", [0.0] * model.cores) if model.driver_apart else nodes[0]
        self.world = World(model.constants, driver)
        self.slots = Slots(nodes, crowded=model.fill)
        self._chance = random.Random(model.seed + 1)
        self._journals: dict[str, bytearray] = {}
        self._on_node: dict[Node, list[Endpoint]] = {}
        self._pids = _FIRST_PID
        self._unpacked: tuple[bytes, RankCall] | None = None
        self._successor: dict[Node, Node] = {}
        self._twins: dict[int, list[TimedRef]] = {}  # by the reference of the value with which they come
        for node in nodes:
            self._may_fail(node)

    def wall_ns(self) -> int:
        """The time as a clock on the wall shows it."""
        return self._began_ns + int(self.clock.now() * 1e9)

    def sleep(self, seconds: float) -> None:
        """Let time pass in which the driver does nothing."""
        with self._lock:
            self.world.events.until(self.clock.advance(seconds))

    def _end(self, endpoint: Endpoint, lost: Lost, at: float) -> Iterable[TimedRef]:
        """End a rank; what it has not given back by now is lost."""
        rank: SimulatedRank = endpoint.handle
        if not rank.alive:
            return
        rank.end(lost)
        rank.process.end()
        for work, ref in rank.under_way.values():
            ref.inner, ref.at = InlineRef(lost=lost), at
            work.out.arrive(at)
            yield ref
        rank.under_way.clear()

    def _spend(self, seconds: float) -> float:
        """Let the driver be busy; the time when it is done."""
        now = self.clock.now()
        self.world.events.until(now)
        return self.clock.advance_to(self.world.driver.compute(now, seconds))

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        constants, world = self.model.constants, self.world
        width = request.max_concurrency or 1
        with self._lock:
            self._spend(constants.start_s)
            made: list[Endpoint] = []
            stand_in: StandIn | None = None
            last = self.clock.now()
            for index, slot in enumerate(request.slots):
                node, facts = self.slots.facts(slot, request.reservations[slot.pool])
                asked = self._spend(constants.create_s)
                there = node.compute(asked + constants.latency_s, constants.process_s)
                last = max(last, there)
                self._pids += 1
                started = (self._began_ns + int(there * 1e9)) / 1e9
                if stand_in is None or self.model.run == "each":
                    host = request.factory(InlineServices(facts, self._own_folder()))
                    inner = Endpoint(slot, InlineRank(host), host.report())
                    stand_in = StandIn(inner, request, self.model.run != "none")
                rank = SimulatedRank(Process(world, node, there, width), stand_in)
                reported = Facts(facts, self._pids, started, 0, folder=self._own_folder())
                name = request.names[index] if request.names else None
                made.append(Endpoint(slot, rank, reported, name))
                self._on_node.setdefault(node, []).append(made[-1])
            world.events.until(last)
            self.clock.advance_to(last)
            self._spend(constants.take_s * len(made))
        return made

    def run_setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        """Make the stand-in of a group a rank, in this process."""
        return InlineTransport.setup(self, endpoint, data, plain(refs))

    def run_call(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], returns: int
    ) -> Ticket:
        """Run a call on a stand-in, in this process."""
        return InlineTransport.submit(self, endpoint, role, method, data, plain(refs), returns)

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        rank: SimulatedRank = endpoint.handle
        with self._lock:
            setup, _ = RankSetup.unpack(data)
            rank.rank = setup.rank
            stand_in = rank.stand_in
            answer = (
                stand_in.setup(self, data, plain(refs))
                if not stand_in.classes
                else Answer(Ticket(InlineRef()))
            )
            cost = self.costs.of(_class_of(stand_in, ""), "", STARTING)
            if stand_in.setup_seconds is None:
                stand_in.setup_seconds, stand_in.made = answer.seconds, answer.ticket.value
            trace = (path_of(setup.files, setup.trace), SETUP_CALL) if setup.trace else None
            inner = Answer(Ticket(stand_in.made), stand_in.setup_seconds, self.model.run != "none")
            cpu = self.model.constants.setup_s
            return Ticket(self._send(endpoint, data, refs, cost, inner, cpu, SETUP_CALL, trace))

    def submit(
        self,
        endpoint: Endpoint,
        role: str,
        method: str,
        data: bytes,
        refs: Sequence[Ref],
        returns: int = OUTPUT,
    ) -> Ticket:
        rank: SimulatedRank = endpoint.handle
        with self._lock:
            stand_in = rank.stand_in
            call = self._unpack(data)
            name = method if call is None else call.method
            is_ours = name.startswith(HOST)
            cost = Cost(0.0) if is_ours else self.costs.of(_class_of(stand_in, role), role, _shown(name))
            given = {"value": cost.returns} if cost.gives else None
            answer = stand_in.call(self, endpoint, role, name, call, data, refs, returns, given)
            if call is None:
                endpoint.bare_calls += 1
            number = -endpoint.bare_calls if call is None else call.call
            trace = None
            if call is not None and call.trace:
                trace = (path_of(endpoint.facts.files, call.trace), call.call)
            ref = self._send(endpoint, data, refs, cost, answer, self.model.constants.handle_s, number, trace)
            info, rest = answer.ticket.info, answer.ticket.rest
            return Ticket(ref, self._with(ref, info), self._with(ref, rest))

    def _with(self, ref: TimedRef, other: Ref | None) -> Ref | None:
        """Another object that a call gives, there with its value."""
        if other is None:
            return None
        twin = TimedRef(other, ref.at, ref.endpoint)
        self._twins.setdefault(id(ref), []).append(twin)
        return twin

    def _unpack(self, data: bytes) -> RankCall | None:
        if data == BARE:
            return None
        if self._unpacked is None or self._unpacked[0] is not data:
            self._unpacked = (data, RankCall.unpack(data))
        return self._unpacked[1]

    def _send(
        self,
        endpoint: Endpoint,
        data: bytes,
        refs: Sequence[Ref],
        cost: Cost,
        answer: Answer,
        cpu: float,
        number: int,
        trace: tuple[str, int] | None,
    ) -> TimedRef:
        """Send one rank its message, in the model."""
        rank: SimulatedRank = endpoint.handle
        constants, world = self.model.constants, self.world
        inner: InlineRef = answer.ticket.value
        now = self._spend(constants.submit_s + len(data) / constants.message_bytes_per_s)
        self.messages += 1
        self.message_bytes += len(data)
        if not rank.alive:
            return TimedRef(InlineRef(lost=rank.lost), now, endpoint)
        needs = [value for value in map(value_of, refs) if value is not None]
        nbytes = len(data) + sum(value.nbytes for value in needs)
        seconds = self._seconds(cost, answer, nbytes)
        if cost.fail and self._chance.random() < cost.fail:
            fault = SimulatedFault(f"rank {rank.rank} fails by chance (simulated)")
            inner = InlineRef(failure=capture(fault, rank=rank.rank))
        out = Value(cost.out if cost.out is not None else inner.nbytes)
        ref = SimulatedRef(inner, FOR_EVER, endpoint, out)

        def done(work: Work, at: float) -> Iterable[TimedRef]:
            rank.under_way.pop(number, None)
            ended = [ref, *self._twins.pop(id(ref), ())]
            for one in ended:
                one.at = at
            if number == SETUP_CALL and not ref.failed:
                began = self._began_ns / 1e9
                ref.inner = InlineRef((began + work.started, began + work.finished))
            out.arrive(at)
            if trace is not None:
                self._note(trace, work, nbytes, inner)
            return ended

        work = Work(seconds, cpu, len(data), needs, out, done)
        rank.under_way[number] = (work, ref)
        there = world.wires.sent(world.driver, rank.process.node, len(data), now)
        world.events.at(there, lambda at: rank.process.arrive(work, at))
        return ref

    def _seconds(self, cost: Cost, answer: Answer, nbytes: int) -> float:
        seconds = cost.seconds
        if seconds is None:
            seconds = answer.seconds if answer.real else 0.0
        seconds += cost.per_mb * nbytes / (1 << 20)
        if cost.spread:
            seconds *= max(0.0, self._chance.gauss(1.0, cost.spread))
        return seconds

    def _note(self, trace: tuple[str, int], work: Work, nbytes: int, inner: InlineRef) -> None:
        """What the rank would have written of a call that is traced."""
        path, number = trace
        at = [
            self._began_ns + int(t * 1e9) for t in (work.received, work.started, work.finished, work.returned)
        ]
        error = "null" if inner.failure is None else json.dumps("SimulatedFault")
        journal = self._journals.setdefault(path, bytearray())
        journal += (
            f'["{IN}",{number},{at[0]}]\n["{RUN}",{number},{at[1]},{nbytes}]\n'
            f'["{OUT}",{number},{at[2]},{at[3]},{work.out.nbytes},{error}]\n'
        ).encode()

    def stream(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], buffer: int | None
    ) -> RankStream:
        """The items come without taking time; the method's stated cost is that of the call."""
        stand_in = endpoint.handle.stand_in
        self._spend(self.model.constants.submit_s)
        host = stand_in.endpoint.handle.host
        if self.model.run == "none" or host is None:
            return InlineStream(iter((StreamEnd(0),)), lambda work: InlineRef(work()))
        return InlineStream(host.stream(data, plain(refs)), lambda work: self._step(stand_in.endpoint, work))

    def put(self, value: wire.Value) -> Ref:
        constants = self.model.constants
        nbytes = value.nbytes if isinstance(value, Encoded | Bundle) else 0
        with self._lock:
            now = self._spend(constants.put_s + nbytes / constants.store_bytes_per_s)
            stored = Value(nbytes, now)
            ref = SimulatedRef(InlineRef(value), now, None, stored)
            self.world.wires.store(id(stored), self.world.driver, now)
        return ref

    def ref_types(self) -> tuple[type, ...]:
        return (InlineRef, TimedRef, SimulatedRef)

    def _reach(self, refs: Sequence[Ref], count: int, limit: float, *, stop_at_failure: bool) -> None:
        with self._lock:
            events, clock = self.world.events, self.clock
            events.until(clock.now())
            waited = {id(ref) for ref in refs if isinstance(ref, TimedRef) and ref.at == FOR_EVER}
            left = count - (len(refs) - len(waited))
            if stop_at_failure and any(has_failed(ref) for ref in refs if at_of(ref) != FOR_EVER):
                return
            while left > 0 and waited:
                if events.next > limit or events.next == FOR_EVER:
                    self._pass(limit)
                    return
                for ended in events.step() or ():
                    if id(ended) in waited:
                        waited.discard(id(ended))
                        left -= 1
                        clock.advance_to(ended.at)
                        if stop_at_failure and ended.failed:
                            return

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        found = super().fetch(refs, timeout)
        constants, world = self.model.constants, self.world
        with self._lock:
            nbytes = 0
            until = self.clock.now()
            for value in map(value_of, refs):
                if value is not None and value.nbytes:
                    nbytes += value.nbytes
                    until = max(
                        until, world.wires.arrive(id(value), value.nbytes, world.driver, self.clock.now())
                    )
            world.events.until(until)
            self.clock.advance_to(until)
            per_rank = constants.take_s * len(refs)
            self._spend(constants.call_s + per_rank + nbytes / constants.copy_bytes_per_s)
        return found

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        lost = Lost("the rank was stopped", "stopped", intended=True)
        with self._lock:
            for endpoint in endpoints:
                list(self._end(endpoint, lost, self.clock.now()))
                stand_in: StandIn = endpoint.handle.stand_in
                stand_in.endpoint.handle.host = None
        return ()

    def signal(self, endpoints: Sequence[Endpoint], signum: int) -> None:
        if signum in (signals.SIGKILL, signals.SIGTERM, signals.SIGABRT, signals.SIGSEGV):
            lost = Lost("the rank was ended by an injected signal", f"signal {signals.Signals(signum).name}")
            for endpoint in endpoints:
                list(self._end(endpoint, lost, self.clock.now()))

    def cancel(self, endpoints: Sequence[Endpoint], call: int) -> list[bool]:
        dropped: list[bool] = []
        for endpoint in endpoints:
            rank: SimulatedRank = endpoint.handle
            work, ref = rank.under_way.pop(call, (None, None))
            if work is None or ref is None:
                dropped.append(False)
                continue
            now = self.clock.now()
            dropped.append(rank.process.drop(work, now))
            ref.inner = InlineRef(
                failure=capture(CallCancelled("was cancelled"), kind="cancelled", rank=rank.rank)
            )
            for one in (ref, *self._twins.pop(id(ref), ())):
                one.at = now
            work.out.arrive(now)
        return dropped

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[Sight]:
        return [Sight(reachable=endpoint.handle.alive) for endpoint in endpoints]

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        if path in self._journals:
            return bytes(self._journals[path][offset : offset + limit])
        return super().read(endpoint, path, offset, limit)


def _class_of(stand_in: StandIn, role: str) -> str:
    return stand_in.classes.get(role) or stand_in.class_name


def _shown(method: str) -> str:
    """A function that is run on the workers goes by the name "run"."""
    return "run" if method.startswith("__phalanx_") else method
