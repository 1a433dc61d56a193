"""The relays of a simulated group: processes that are times, and messages between them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.topology.relays import RelayTree
from phalanx.transport.inline_values import InlineRef, fetched
from phalanx.transport.relaying import Part
from phalanx.transport.simulated.constants import Constants
from phalanx.transport.simulated.machines import Node
from phalanx.transport.simulated.posting import Posting
from phalanx.transport.simulated.processes import World
from phalanx.transport.simulated.refs import SimulatedRef, value_of
from phalanx.transport.timed import FOR_EVER, SteppedClock, TimedRef
from phalanx.transport.values import Endpoint, Lost, Ref, Ticket
from phalanx.wire.outputs import HALVED
from phalanx.wire.relayed import BY_VALUE_BYTES, Batch, Envelope, Gone, Shares, part_of

Ended = Iterable[TimedRef] | None
Tell = Callable[[int, float, bool], None]
"""(bytes, time, whether all returned): what a relay tells whoever called it."""


class Driver(Protocol):
    """What relays need of the backend whose they are."""

    clock: SteppedClock
    world: World

    def spend(self, seconds: float) -> float: ...
    def message_s(self, nbytes: int) -> float: ...
    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]: ...
    def fetch_batches(self, refs: Sequence[Ref], timeout: float | None) -> list[Any]: ...
    def prepared(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], returns: int
    ) -> tuple[Ticket, Posting]: ...


class RelayProcess:
    """One relay: it does one thing after another, each on a core of its node."""

    def __init__(self, world: World, node: Node, since: float) -> None:
        self._world = world
        self.node = node
        self._queue: deque[tuple[float, Callable[[float], Ended]]] = deque()
        self._busy = True
        self._ended = False
        node.has(world.constants.idle_s)
        world.events.at(since, self._go_on)

    @property
    def alive(self) -> bool:
        """Whether it is there, and its node."""
        return not self._ended and self.node.fails_at > self._world.events.now

    def end(self) -> None:
        """It is not there any more. Idempotent."""
        if not self._ended:
            self.node.has(-self._world.constants.idle_s)
        self._ended = True

    def do(self, time: float, seconds: float, act: Callable[[float], Ended]) -> None:
        """Be busy for so long once what came before is done; then ``act(time)``."""
        self._queue.append((seconds, act))
        if not self._busy:
            self._go_on(time)

    def _go_on(self, time: float) -> None:
        self._busy = bool(self._queue) and self.alive
        if self._busy:
            seconds, act = self._queue.popleft()
            self._world.events.at(self.node.compute(time, seconds), lambda at: self._done(act, at))

    def _done(self, act: Callable[[float], Ended], time: float) -> Ended:
        ended = act(time) if self.alive else None
        self._go_on(time)
        return ended


@dataclass(eq=False)
class Way:
    """A call at a relay: how many of those below it have not answered, and how many bytes the others gave."""

    left: int
    tell: Tell
    nbytes: int = 0
    over: bool = False

    def came(self, nbytes: int, time: float, ok: bool) -> None:
        """One of them answered; the first failure is told at once, else all together."""
        self.left -= 1
        self.nbytes += nbytes
        if self.over or (ok and self.left):
            return
        self.over = True
        self.tell(self.nbytes if ok else 0, time, ok)


@dataclass
class Counted:
    """What went between the processes of a tree: messages on their way down, to relays and to ranks."""

    calls: int = 0
    messages: int = 0
    nbytes: int = 0


class SimulatedRelays:
    """Relays on the nodes of their ranks; see ``transport.relaying.Relays``."""

    def __init__(self, driver: Driver, constants: Constants, tree: RelayTree, endpoints: Sequence[Endpoint]):
        self.tree = tree
        self.counted = Counted()
        self._driver = driver
        self._constants = constants
        self._endpoints = endpoints
        nodes: dict[str, Node] = {e.facts.slot.node_id: e.handle.process.node for e in endpoints}
        self._shares = [Shares([tree.relays[below].ranks for below in relay.below]) for relay in tree.relays]
        self._processes = [self._started(nodes[relay.node]) for relay in tree.relays]
        self._kept: dict[tuple[int, int], list[Ticket]] = {}
        self._open: dict[int, tuple[int, SimulatedRef]] = {}  # of each batch under way: its head
        self._batches = itertools.count()
        self._under = {head: self._subtree(head) for head in tree.head_indices}

    def _started(self, node: Node) -> RelayProcess:
        asked = self._driver.spend(self._constants.create_s)
        there = node.process(asked + self._constants.latency_s, self._constants.process_s)
        return RelayProcess(self._driver.world, node, there)

    def _subtree(self, index: int) -> list[int]:
        return [index, *(under for below in self.tree.relays[index].below for under in self._subtree(below))]

    def send(self, head: int, envelope: Envelope, refs: Sequence[Ref]) -> Ref:
        index = self.tree.head_indices[head]
        data = envelope.pack()
        for serial in envelope.over:
            self._kept.pop((head, serial), None)
        tickets, postings = self._prepared(index, envelope, refs)
        self._kept[head, envelope.serial] = tickets
        returned: list[Any] = [ticket.value for ticket in tickets]
        if envelope.returns == HALVED:
            returned += [ticket.rest for ticket in tickets]
        batch = SimulatedRef(InlineRef(Batch(len(returned), [], returned)), FOR_EVER)
        number, world = next(self._batches), self._driver.world
        self._open[number] = (index, batch)

        def answered(nbytes: int, time: float, ok: bool) -> None:
            there = world.wires.sent(self._processes[index].node, world.driver, nbytes, time)
            world.events.at(there, lambda at: self._ended(number, nbytes, at, ok))

        at = self._driver.spend(
            self._driver.message_s(len(data)) + self._constants.relayed_rank_s * len(tickets)
        )
        self.counted.calls += 1
        self._forward(index, world.driver, at, envelope, len(data), postings, answered)
        return batch

    def _ended(self, number: int, nbytes: int, time: float, ok: bool) -> list[TimedRef]:
        _, batch = self._open.pop(number, (0, None))
        if batch is None:  # lost with its relay before
            return []
        batch.at, batch.value.nbytes = time, nbytes
        if not ok:
            batch.inner = InlineRef(lost=Lost("not all ranks returned"))
        return [batch]

    def _prepared(
        self, index: int, envelope: Envelope, refs: Sequence[Ref]
    ) -> tuple[list[Ticket], list[Posting]]:
        """What each rank is sent, in the order of the envelope."""
        ranks = self.tree.relays[index].ranks if envelope.ranks is None else envelope.ranks
        tickets: list[Ticket] = []
        postings: list[Posting] = []
        messages = [(data, [refs[place] for place in places]) for data, places in envelope.messages]
        which = envelope.which or [0] * len(ranks)
        for position, rank in enumerate(ranks):
            endpoint = self._endpoints[rank]
            if envelope.bare:
                endpoint.bare_calls = envelope.bare[position]
            data, own = messages[which[position]]
            ticket, posting = self._driver.prepared(
                endpoint, envelope.role, envelope.method, data, own, envelope.returns
            )
            tickets.append(ticket)
            postings.append(posting)
        return tickets, postings

    def _forward(
        self,
        index: int,
        source: Node,
        time: float,
        envelope: Envelope,
        nbytes: int,
        postings: Sequence[Posting],
        tell: Tell,
    ) -> None:
        """Send an envelope to a relay; it is dealt with once it is there."""
        constants, world, relay = self._constants, self._driver.world, self._processes[index]
        self.counted.messages += 1
        self.counted.nbytes += nbytes
        there = world.wires.sent(source, relay.node, nbytes, time)
        seconds = constants.relay_call_s + nbytes / constants.message_bytes_per_s
        deal = self._to_relays if self.tree.relays[index].below else self._to_ranks
        world.events.at(
            there, lambda at: relay.do(at, seconds, lambda then: deal(index, envelope, postings, tell, then))
        )

    def _to_relays(
        self, index: int, envelope: Envelope, postings: Sequence[Posting], tell: Tell, time: float
    ) -> None:
        shares = self._shares[index].of(envelope.ranks)
        way = Way(len(shares), tell)
        for child, positions, ranks in shares:
            part, _ = part_of(envelope, positions if len(positions) < len(postings) else None, ranks)
            own = [postings[position] for position in positions]
            self._to_relay(index, self.tree.relays[index].below[child], part, own, way, time)

    def _to_relay(
        self, index: int, below: int, part: Envelope, postings: Sequence[Posting], way: Way, time: float
    ) -> None:
        relay, constants, world = self._processes[index], self._constants, self._driver.world
        data = part.pack()

        def answered(nbytes: int, at: float, ok: bool) -> None:
            there = world.wires.sent(self._processes[below].node, relay.node, nbytes, at)
            seconds = constants.relay_take_s + nbytes / constants.message_bytes_per_s
            world.events.at(there, lambda at: relay.do(at, seconds, lambda then: way.came(nbytes, then, ok)))

        def send(at: float) -> None:
            self._forward(below, relay.node, at, part, len(data), postings, answered)

        relay.do(time, constants.relay_send_s + len(data) / constants.message_bytes_per_s, send)

    def _to_ranks(
        self, index: int, envelope: Envelope, postings: Sequence[Posting], tell: Tell, time: float
    ) -> None:
        way = Way(len(postings), tell)
        for posting in postings:
            self._to_rank(index, posting, way, time)

    def _to_rank(self, index: int, posting: Posting, way: Way, time: float) -> None:
        relay, constants = self._processes[index], self._constants

        def came(at: float) -> None:
            nbytes = posting.out.nbytes if posting.out.nbytes <= BY_VALUE_BYTES else 0
            seconds = constants.relay_take_s + nbytes / constants.message_bytes_per_s
            relay.do(at, seconds, lambda then: way.came(nbytes, then, not posting.ref.failed))

        def send(at: float) -> Ended:
            self.counted.messages += 1
            self.counted.nbytes += posting.message_bytes
            if posting.out.at != FOR_EVER:  # it was lost, or cancelled, before it was sent
                return came(at)
            posting.out.waiting.append(came)
            return posting.post(self._driver.world, relay.node, at)

        size = posting.message_bytes / constants.message_bytes_per_s
        relay.do(time, constants.relay_send_s + size, send)

    def forget(self, head: int, serials: Sequence[int]) -> None:
        self._driver.spend(self._driver.message_s(0))
        self.counted.messages += len(self._under[self.tree.head_indices[head]])
        for serial in serials:
            self._kept.pop((head, serial), None)

    def batches(self, refs: Sequence[Ref], timeout: float | None) -> list[Batch]:
        return self._driver.fetch_batches(refs, timeout)

    def outputs(self, batches: Sequence[Batch], timeout: float | None) -> list[list[Any]]:
        large = [
            ref
            for batch in batches
            for ref in batch.refs
            if (value := value_of(ref)) is not None and value.nbytes > BY_VALUE_BYTES
        ]
        if large:
            self._driver.fetch(large, timeout)
        return [fetched(batch.refs) for batch in batches]

    def parts(self, head: int, serial: int, count: int, timeout: float) -> list[Part]:
        constants = self._constants
        now = self._driver.spend(constants.call_s + constants.relay_call_s + 2 * constants.latency_s)
        gone = self.gone(head)
        if gone is not None:
            return [Part(None, True, gone)] * count
        return [Part(ticket, ticket.value.at <= now) for ticket in self._kept[head, serial]]

    def after(self, calls: Sequence[tuple[int, int]]) -> None:
        """Whoever calls directly waits: time passes by that."""

    def gone(self, head: int | None = None) -> Gone | None:
        indices = range(len(self._processes)) if head is None else self._under[self.tree.head_indices[head]]
        for index in indices:
            if not self._processes[index].alive:
                return Gone(self._name(index), "its node failed (simulated)")
        return None

    def fail(self, node: Node, time: float) -> list[TimedRef]:
        """Note that a node has failed: what its relays were at is lost with them."""
        lost: list[TimedRef] = []
        for number, (head, batch) in list(self._open.items()):
            if any(self._processes[index].node is node for index in self._under[head]):
                del self._open[number]
                batch.inner, batch.at = InlineRef(lost=Lost("a relay is gone")), time
                lost.append(batch)
        return lost

    def _name(self, index: int) -> str:
        ranks = self.tree.relays[index].ranks
        return f"relay {index} of ranks {ranks[0]}-{ranks[-1]}"

    def whereabouts(self) -> list[tuple[str, int, str, int]]:
        return [
            (self._name(index), len(relay.ranks), relay.node, 0)
            for index, relay in enumerate(self.tree.relays)
        ]

    def end(self) -> None:
        for process in self._processes:
            process.end()
        self._kept.clear()
