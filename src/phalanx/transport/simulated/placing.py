"""Slots of a simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import PlacementError
from phalanx.topology.placement import Holder, NodeCapacity, check_feasible, placement_table
from phalanx.topology.slots import Slot, SlotFacts
from phalanx.transport.simulated.machines import Node
from phalanx.transport.values import Reservation, ReserveRequest


@dataclass
class SimulatedReservation:
    """Slots that are held: the node of each block, and the accelerators of each slot."""

    name: str
    blocks: tuple[int, ...]
    bundle: Mapping[str, float]
    nodes: list[Node]
    accelerators: dict[tuple[int, int], tuple[str, ...]] = field(
        default_factory=dict[tuple[int, int], tuple[str, ...]]
    )

    @property
    def ids(self) -> Sequence[Any]:
        return [self] * len(self.blocks)


class Slots:
    """Who holds what on which node. Where ``crowded``, pools may ask for more than the nodes have."""

    def __init__(self, nodes: list[Node], crowded: bool) -> None:
        self.nodes = nodes
        self._crowded = crowded
        self._held: dict[int, SimulatedReservation] = {}

    def capacities(self) -> list[NodeCapacity]:
        """The nodes with what they have, and what is free of it."""
        free: dict[Node, dict[str, float]] = {}
        for held in self._held.values():
            for size, node in zip(held.blocks, held.nodes, strict=True):
                left = free.setdefault(node, self._total(node))
                for resource, amount in held.bundle.items():
                    left[resource] = max(0.0, left.get(resource, 0.0) - amount * size)
        return [
            NodeCapacity(node.name, node.name, self._total(node), free.get(node, self._total(node)))
            for node in self.nodes
        ]

    def _total(self, node: Node) -> dict[str, float]:
        total = {"CPU": float(len(node.cores))}
        return {**total, "GPU": float(node.slots)} if node.slots else total

    def holders(self) -> list[Holder]:
        """Who holds what on which node."""
        return [
            Holder(held.name, node.name, {key: amount * size for key, amount in held.bundle.items()})
            for held in self._held.values()
            for size, node in zip(held.blocks, held.nodes, strict=True)
        ]

    def reserve(self, request: ReserveRequest) -> SimulatedReservation:
        """Hold slots. Raises PlacementError."""
        held = SimulatedReservation(
            request.name, request.blocks, dict(request.bundle), self._nodes_for(request)
        )
        per_slot = int(next((n for key, n in request.bundle.items() if key not in ("CPU", "memory")), 0))
        used: dict[Node, int] = {}
        for block, (size, node) in enumerate(zip(request.blocks, held.nodes, strict=True)):
            for bundle in range(size):
                first = used.get(node, node.held)
                used[node] = first + per_slot
                held.accelerators[block, bundle] = tuple(
                    str(number % max(1, node.slots)) for number in range(first, first + per_slot)
                )
        for node, taken in used.items():
            node.held = taken
        self._held[id(held)] = held
        return held

    def _nodes_for(self, request: ReserveRequest) -> list[Node]:
        by_name = {node.name: node for node in self.nodes}
        if request.on_nodes:
            return [by_name[name] for name in request.on_nodes]
        known = {"CPU", *(("GPU",) if any(node.slots for node in self.nodes) else ())}
        if self._crowded and known.issuperset(request.bundle):
            return [self.nodes[block % len(self.nodes)] for block in range(len(request.blocks))]
        capacities = self.capacities()
        checked = check_feasible(capacities, request.blocks, request.bundle)
        if checked.fits_now and checked.nodes is not None:
            return [by_name[name] for name in checked.nodes]
        verdict = "does not fit beside what is held" if checked.fits_total else "can never be placed"
        table = placement_table(capacities, request.blocks, request.bundle, self.holders())
        raise PlacementError(f"{request.name}: {verdict} on the simulated cluster\n{table}")

    def release(self, reservation: Reservation) -> None:
        """Give slots back. Idempotent."""
        held = self._held.pop(id(reservation), None)
        if held is not None:
            per_slot = int(next((n for key, n in held.bundle.items() if key not in ("CPU", "memory")), 0))
            for size, node in zip(held.blocks, held.nodes, strict=True):
                node.held -= per_slot * size

    def facts(self, slot: Slot, reservation: Reservation) -> tuple[Node, SlotFacts]:
        """Where the process of a slot is."""
        held = held_of(reservation)
        node = held.nodes[slot.block]
        number = self.nodes.index(node) if len(self.nodes) < 2 else int(node.name.split("-")[1])
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        ids = held.accelerators[slot.block, slot.bundle]
        return node, SlotFacts(node.name, node.name, address, ids, len(node.cores))


def held_of(reservation: Reservation) -> SimulatedReservation:
    """The reservation as this backend made it. Raises PlacementError for another backend's."""
    if not isinstance(reservation, SimulatedReservation):
        raise PlacementError(f"{reservation!r} belongs to another backend than the simulated one")
    return reservation
