"""What the ranks of a simulated cluster stand on: nodes, which may fail, and slots of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from phalanx.topology.placement import Holder, NodeCapacity
from phalanx.topology.slots import Slot
from phalanx.transport.simulated.machines import Node
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.placing import Slots, held_of
from phalanx.transport.simulated.processes import World
from phalanx.transport.simulated.relays import SimulatedRelays
from phalanx.transport.timed import FOR_EVER, SteppedClock, TimedRef
from phalanx.transport.values import Endpoint, Lost, Reservation, ReserveRequest


class Ground:
    """The nodes of a backend; ``_end`` is its own."""

    model: Model
    clock: SteppedClock
    world: World
    slots: Slots
    made_relays: list[SimulatedRelays]
    _chance: random.Random
    _on_node: dict[Node, list[Endpoint]]
    _successor: dict[Node, Node]

    def _end(self, endpoint: Endpoint, lost: Lost, at: float) -> Iterable[TimedRef]:
        raise NotImplementedError

    def nodes(self) -> list[NodeCapacity]:
        return self.slots.capacities()

    def holders(self) -> list[Holder]:
        return self.slots.holders()

    def reserve(self, request: ReserveRequest) -> Reservation:
        return self.slots.reserve(request)

    def release(self, reservation: Reservation) -> None:
        self.slots.release(reservation)

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        return [held_of(reservations[slot.pool]).nodes[slot.block].name for slot in slots]

    def probe(
        self, slots: Sequence[Slot], reservations: Mapping[str, Reservation], bundle: Mapping[str, float]
    ) -> list[tuple[str, ...]]:
        return [held_of(reservations[slot.pool]).accelerators[slot.block, slot.bundle] for slot in slots]

    def repair(self, reservation: Reservation, timeout: float) -> frozenset[int]:
        """Blocks of nodes that failed move to new ones."""
        held, now = held_of(reservation), self.clock.now()
        moved = frozenset(block for block, node in enumerate(held.nodes) if node.fails_at <= now)
        for block in moved:
            self._replace(held.nodes[block])
        held.nodes = [node if node in self.slots.nodes else self._successor[node] for node in held.nodes]
        return moved

    def _replace(self, gone: Node) -> None:
        if gone not in self.slots.nodes:
            return
        hours = self.model.hours_between_failures
        later = FOR_EVER
        if hours is not None:
            later = self.clock.now() + self._chance.expovariate(1 / (3600.0 * hours))
        new = Node(
            gone.name, [self.clock.now()] * self.model.cores, fails_at=later, slots=gone.slots, held=gone.held
        )
        self.slots.nodes[self.slots.nodes.index(gone)] = new
        self._successor[gone] = new
        self._may_fail(new)

    def _may_fail(self, node: Node) -> None:
        if node.fails_at != FOR_EVER:
            self.world.events.at(node.fails_at, lambda at: self._fail(node, at))

    def _fail(self, node: Node, at: float) -> Iterable[TimedRef]:
        lost = Lost("its node failed (simulated)", "node lost", node_lost=True)
        ended = [ref for endpoint in self._on_node.pop(node, ()) for ref in self._end(endpoint, lost, at)]
        return [*ended, *(ref for relays in self.made_relays for ref in relays.fail(node, at))]
