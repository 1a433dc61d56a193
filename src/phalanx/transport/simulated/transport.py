"""The simulated backend: the contracts of a transport over a model of a cluster, on a clock of its own.

Of each group one worker is there, or none at all; what its methods cost is stated. Everything above runs as it does on
a real cluster.
"""

from __future__ import annotations

import random
import signal as signals
import time
from collections.abc import Iterable, Sequence

from phalanx.errors import CallCancelled
from phalanx.topology.relays import RelayTree
from phalanx.tracing.events import STARTING
from phalanx.tracing.journal import path_of
from phalanx.transport.inline import InlineRank, InlineServices, InlineTransport
from phalanx.transport.inline_values import InlineRef
from phalanx.transport.simulated.costs import Cost, Costs
from phalanx.transport.simulated.ground import Ground
from phalanx.transport.simulated.machines import Node, make_nodes
from phalanx.transport.simulated.model import Model, SimulatedFault
from phalanx.transport.simulated.placing import Slots
from phalanx.transport.simulated.posting import Journals, Posting, SimulatedRank
from phalanx.transport.simulated.processes import Process, Value, Work, World
from phalanx.transport.simulated.rank import Answer, StandIn
from phalanx.transport.simulated.refs import SimulatedRef, value_of
from phalanx.transport.simulated.relays import SimulatedRelays
from phalanx.transport.simulated.streams import SimulatedStream, stated_items
from phalanx.transport.simulated.waiting import EventCalls
from phalanx.transport.timed import FOR_EVER, SteppedClock, TimedRef, plain
from phalanx.transport.values import Endpoint, Lost, RankStream, Ref, Sight, SpawnRequest, Ticket
from phalanx.wire import value as wire
from phalanx.wire.bundle import Bundle
from phalanx.wire.codec import Encoded
from phalanx.wire.failure import capture
from phalanx.wire.messages import BARE, HOST, NO_ARGUMENTS, Facts, RankCall, RankSetup
from phalanx.wire.outputs import OUTPUT
from phalanx.wire.side_channel import SETUP_CALL

_FIRST_PID = 100_000


class SimulatedTransport(Ground, EventCalls, InlineTransport):
    """A backend whose ranks are times in a queue of events."""

    name = "simulated"

    def __init__(self, model: Model, costs: Costs | None = None, relay_from: int | None = None) -> None:
        super().__init__({})
        self.model = model
        self.relay_from = relay_from
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
        self._journals = Journals(self._began_ns)
        self._on_node: dict[Node, list[Endpoint]] = {}
        self._pids = _FIRST_PID
        self._unpacked: tuple[bytes, RankCall] | None = None
        self._successor: dict[Node, Node] = {}
        #: The relays of groups, those that have ended too.
        self.made_relays: list[SimulatedRelays] = []
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

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        constants, world = self.model.constants, self.world
        width = request.max_concurrency or 1
        with self._lock:
            self.spend(constants.start_s)
            made: list[Endpoint] = []
            stand_in: StandIn | None = None
            last = self.clock.now()
            for index, slot in enumerate(request.slots):
                node, facts = self.slots.facts(slot, request.reservations[slot.pool])
                asked = self.spend(constants.create_s)
                there = node.process(asked + constants.latency_s, constants.process_s)
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
            self.spend(constants.take_s * len(made))
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
            return Ticket(
                self._posted(self._message(endpoint, data, refs, cost, inner, cpu, SETUP_CALL, trace))
            )

    def submit(
        self,
        endpoint: Endpoint,
        role: str,
        method: str,
        data: bytes,
        refs: Sequence[Ref],
        returns: int = OUTPUT,
    ) -> Ticket:
        with self._lock:
            ticket, posting = self.prepared(endpoint, role, method, data, refs, returns)
            self._posted(posting)
            return ticket

    def prepared(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], returns: int
    ) -> tuple[Ticket, Posting]:
        """The message of one rank, which nobody has sent yet, and what stands for what it will give."""
        rank: SimulatedRank = endpoint.handle
        stand_in = rank.stand_in
        call = self._unpack(data)
        name = method if call is None else call.method
        cost = self._cost_of(stand_in, role, name)
        given = {"value": cost.returns} if cost.gives else None
        answer = stand_in.call(self, endpoint, role, name, call, data, refs, returns, given)
        if call is None:
            endpoint.bare_calls += 1
        posting = self._of_call(endpoint, call, data, refs, cost, answer)
        info, rest = answer.ticket.info, answer.ticket.rest
        return Ticket(posting.ref, self._with(posting.ref, info), self._with(posting.ref, rest)), posting

    def _cost_of(self, stand_in: StandIn, role: str, name: str) -> Cost:
        if name.startswith(HOST):
            return Cost(0.0)
        return self.costs.of(_class_of(stand_in, role), role, _shown(name))

    def _of_call(
        self,
        endpoint: Endpoint,
        call: RankCall | None,
        data: bytes,
        refs: Sequence[Ref],
        cost: Cost,
        answer: Answer,
    ) -> Posting:
        number = -endpoint.bare_calls if call is None else call.call
        trace = None
        if call is not None and call.trace:
            trace = (path_of(endpoint.facts.files, call.trace), call.call)
        constants = self.model.constants
        cpu = constants.handle_s + (
            0.0 if call is None or call.body == NO_ARGUMENTS else constants.argument_s
        )
        return self._message(endpoint, data, refs, cost, answer, cpu, number, trace)

    def _with(self, ref: TimedRef, other: Ref | None) -> Ref | None:
        """Another object that a call gives, there with its value."""
        if other is None:
            return None
        twin = TimedRef(other, ref.at, ref.endpoint)
        self._twins.setdefault(id(ref), []).append(twin)
        return twin

    def _ended_with(self, ref: TimedRef, at: float) -> list[TimedRef]:
        """Note that a call on a rank is over, and with it all that it gives."""
        ended = [ref, *self._twins.pop(id(ref), ())]
        for one in ended:
            one.at = at
        return ended

    def _unpack(self, data: bytes) -> RankCall | None:
        if data == BARE:
            return None
        if self._unpacked is None or self._unpacked[0] is not data:
            self._unpacked = (data, RankCall.unpack(data))
        return self._unpacked[1]

    def _posted(self, posting: Posting) -> TimedRef:
        """Have the driver send a rank its message."""
        now = self.spend(self.message_s(posting.message_bytes))
        posting.post(self.world, self.world.driver, now)
        return posting.ref

    def message_s(self, nbytes: int) -> float:
        """How long the driver is busy with one message of that size; counts it."""
        self.messages += 1
        self.message_bytes += nbytes
        return self.model.constants.submit_s + nbytes / self.model.constants.message_bytes_per_s

    def _message(
        self,
        endpoint: Endpoint,
        data: bytes,
        refs: Sequence[Ref],
        cost: Cost,
        answer: Answer,
        cpu: float,
        number: int,
        trace: tuple[str, int] | None,
    ) -> Posting:
        rank: SimulatedRank = endpoint.handle
        inner: InlineRef = answer.ticket.value
        if not rank.alive:
            gone = SimulatedRef(InlineRef(lost=rank.lost), FOR_EVER, endpoint)
            gone.value.waiting.append(lambda at: self._ended_with(gone, at))
            return Posting(rank, gone, len(data), None)
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
            ended = self._ended_with(ref, at)
            if number == SETUP_CALL and not ref.failed:
                began = self._began_ns / 1e9
                ref.inner = InlineRef((began + work.started, began + work.finished))
            out.arrive(at)
            if trace is not None:
                self._journals.note(trace, work, nbytes, inner)
            return ended

        work = Work(seconds, cpu, len(data), needs, out, done)
        rank.under_way[number] = (work, ref)
        return Posting(rank, ref, len(data), work)

    def _seconds(self, cost: Cost, answer: Answer, nbytes: int) -> float:
        seconds = cost.seconds
        if seconds is None:
            seconds = answer.seconds if answer.real else 0.0
        seconds += cost.per_mb * nbytes / (1 << 20)
        if cost.spread:
            seconds *= max(0.0, self._chance.gauss(1.0, cost.spread))
        return seconds

    def relays(self, tree: RelayTree, endpoints: Sequence[Endpoint]) -> SimulatedRelays:
        with self._lock:
            self.made_relays.append(SimulatedRelays(self, self.model.constants, tree, endpoints))
        return self.made_relays[-1]

    def stream(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], buffer: int | None
    ) -> RankStream:
        """All items are there once the method's stated time is over; each then costs the driver what a value does."""
        stand_in: StandIn = endpoint.handle.stand_in
        call = RankCall.unpack(data)
        cost = self._cost_of(stand_in, role, call.method)
        with self._lock:
            posting = self._of_call(endpoint, call, data, refs, cost, Answer(Ticket(InlineRef())))
            self._posted(posting)
        host = stand_in.endpoint.handle.host
        if self.model.run == "none" or host is None or cost.gives:
            items = stated_items(cost)
            return SimulatedStream(items, lambda work: InlineRef(work()), posting.ref, self._through)
        if call.trace:  # its journal is the simulation's
            data = call._replace(trace="").pack()
        items = host.stream(data, plain(refs))
        return SimulatedStream(
            items, lambda work: self._step(stand_in.endpoint, work), posting.ref, self._through
        )

    def _through(self, ref: SimulatedRef) -> None:
        self._reach([ref], 1, FOR_EVER, stop_at_failure=False)

    def put(self, value: wire.Value) -> Ref:
        constants = self.model.constants
        nbytes = value.nbytes if isinstance(value, Encoded | Bundle) else 0
        with self._lock:
            now = self.spend(constants.put_s + nbytes / constants.store_bytes_per_s)
            stored = Value(nbytes, now)
            ref = SimulatedRef(InlineRef(value), now, None, stored)
            self.world.wires.store(id(stored), self.world.driver, now)
        return ref

    def ref_types(self) -> tuple[type, ...]:
        return (InlineRef, TimedRef, SimulatedRef)

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
            self._ended_with(ref, now)
            work.out.arrive(now)
        return dropped

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[Sight]:
        return [Sight(one.handle.alive, gone=not one.handle.alive) for one in endpoints]

    def read(self, endpoint: Endpoint, path: str, offset: int, limit: int) -> bytes:
        written = self._journals.read(path, offset, limit)
        return super().read(endpoint, path, offset, limit) if written is None else written


def _class_of(stand_in: StandIn, role: str) -> str:
    return stand_in.classes.get(role) or stand_in.class_name


def _shown(method: str) -> str:
    """A function that is run on the workers goes by the name "run"."""
    return "run" if method.startswith("__phalanx_") else method
