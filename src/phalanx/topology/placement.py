"""Check whether a pool fits on a cluster, and explain reason and remedy in a table if it does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phalanx.errors import DeclarationError
from phalanx.topology.environment import resource_names

# Ray counts resources in units of 1/10000.
_UNITS = 10_000
MINIMAL_CPU = 0.01
"""CPUs of a slot without accelerators: few, but visible in reports of resources."""

_TYPE_PREFIX = "accelerator_type:"
_TYPE_AMOUNT = 0.001
_BYTES = ("memory", "object_store_memory")

Resources: TypeAlias = Mapping[str, float]
"""Amounts of Ray's resources by name; memory in bytes."""


@dataclass(frozen=True)
class NodeCapacity:
    """Total and available resources of a node."""

    node_id: str
    host: str
    total: Resources
    available: Resources


@dataclass(frozen=True)
class Holder:
    """Resources that a reservation, called ``name``, holds on a node."""

    name: str
    node_id: str
    resources: Resources


def fits_on(amounts: Iterable[Resources], blocks: Sequence[int], resources: Resources) -> bool:
    """Return whether blocks of slots fit on nodes with these ``amounts``; see :func:`fits`.

    ``blocks[i]`` slots are on a single node, each slot with ``resources``.
    """
    return fits(blocks, [capacity(of_node, resources) for of_node in amounts])


def capacity(amounts: Resources, resources: Resources) -> int:
    """Return the number of slots of ``resources`` that fit in the ``amounts`` of a node."""
    counts = (
        _units(amounts.get(name, 0.0)) // wanted
        for name, amount in resources.items()
        if (wanted := _units(amount)) > 0
    )
    return max(0, min(counts, default=_UNITS))  # a slot without resources fits anywhere


def share(max_colocate_count: int, amount: float = 1.0) -> float:
    """Return the share of ``amount`` of a slot's resource that each of ``max_colocate_count`` processes gets.

    The share is rounded down to a multiple of 1/10000, so that ``max_colocate_count`` shares always fit.

    Raises:
        DeclarationError: if the count is not from 1 to 10000.
    """
    if not 1 <= max_colocate_count <= _UNITS:
        raise DeclarationError(
            f"max_colocate_count={max_colocate_count}: expected a whole number from 1 to {_UNITS}, the number of "
            "groups that may share a slot"
        )
    return (_units(amount) // max_colocate_count) / _UNITS


def bundle_resources(
    use_accelerator: str | None,
    accelerators_per_slot: int = 1,
    accelerator_type: str | None = None,
    cpu: float | None = None,
) -> dict[str, float]:
    """Return the resources of a slot. ``use_accelerator`` is Ray's resource name ("GPU"), or None for CPU slots.

    ``accelerator_type`` restricts the slot to nodes with that type (Ray's names, such as "A100"). Unless ``cpu`` is
    given, an accelerator slot gets no CPU, and a CPU slot gets 0.01, so that many ranks start on few cores.
    """
    bundle: dict[str, float] = {}
    if use_accelerator is not None:
        bundle[use_accelerator] = float(accelerators_per_slot)
    cpus = cpu if cpu is not None else 0.0 if use_accelerator else MINIMAL_CPU
    if cpus:
        bundle["CPU"] = max(cpus, 1 / _UNITS)
    if accelerator_type is not None:
        bundle[_TYPE_PREFIX + accelerator_type] = _TYPE_AMOUNT
    return bundle


@dataclass(frozen=True)
class PlacementTable:
    """The request for slots, the capacity of each node, the holders, and the remedies; ``str()`` is the table."""

    nodes: Sequence[NodeCapacity]
    blocks: Sequence[int]
    resources: Resources
    holders: Sequence[Holder] = ()

    def __str__(self) -> str:
        return "\n".join([self.wanted(), *self.rows(), *(f"-> {advice}" for advice in self.advice())])

    @property
    def slots(self) -> int:
        return sum(self.blocks)

    def wanted(self) -> str:
        each = amounts_text(self.resources) or "nothing"
        total = amounts_text({name: amount * self.slots for name, amount in self.resources.items()})
        return (
            f"wanted: {self.slots} slot{'s' * (self.slots != 1)} in blocks of {list(self.blocks)}, each block on one "
            f"node; {each} per slot, {total or 'nothing'} in all"
        )

    def rows(self) -> list[str]:
        header = ["node", *(f"{name} have/free" for name in self._columns()), "slots ever/now", "held by"]
        return _aligned([header, *(self._row(node) for node in self.nodes)])

    def advice(self) -> list[str]:
        if not self.nodes:
            return ["no living node can take slots (draining ones cannot): see `ray status`, or add a node"]
        missing = [
            name
            for name, amount in self.resources.items()
            if amount > 0 and not any(node.total.get(name, 0) > 0 for node in self.nodes)
        ]
        if missing:
            return [self._missing(name) for name in missing]
        if not fits_on((node.total for node in self.nodes), self.blocks, self.resources):
            return self._never()
        if not fits_on((node.available for node in self.nodes), self.blocks, self.resources):
            return self._busy()
        return ["enough slots are free now: try again, or use smaller blocks, which are easier to spread"]

    def _columns(self) -> list[str]:
        return [name for name in self.resources if not name.startswith(_TYPE_PREFIX)]

    def _row(self, node: NodeCapacity) -> list[str]:
        have = [
            f"{amount_text(name, node.total.get(name, 0))}/{amount_text(name, node.available.get(name, 0))}"
            for name in self._columns()
        ]
        fitting = [capacity(amounts, self.resources) for amounts in (node.total, node.available)]
        held = [
            f"{holder.name} ({amounts_text(holder.resources)})"
            for holder in self.holders
            if holder.node_id == node.node_id and any(name in holder.resources for name in self.resources)
        ]
        name = f"{node.host} [{node.node_id[:8]}]"
        return [name, *have, "/".join(map(str, fitting)), ", ".join(held) or "-"]

    def _missing(self, name: str) -> str:
        if name in resource_names():
            wanted = int(self.resources[name] * self.slots)
            others = [r for r in resource_names() if any(node.total.get(r, 0) > 0 for node in self.nodes)]
            present = (
                f"no node has a {name}, but there are {', '.join(others)}"
                if others
                else "no node has accelerators"
            )
            logical = f", or px.init(num_gpus={wanted}) for logical GPUs" if name == "GPU" else ""
            return f"{present}: pass use_gpu=False{logical}"
        if name.startswith(_TYPE_PREFIX):
            types = sorted(
                {r[len(_TYPE_PREFIX) :] for n in self.nodes for r in n.total if r.startswith(_TYPE_PREFIX)}
            )
            return (
                f"no node has accelerator type {name[len(_TYPE_PREFIX) :]!r}; present: "
                f"{', '.join(types) or 'none'}. Pass one of these as accelerator_type, or leave it out"
            )
        return f"no node has the resource {name!r}: start one with it (`ray start --help`), or leave it out"

    def _never(self) -> list[str]:
        capacities = [capacity(node.total, self.resources) for node in self.nodes]
        largest, total = max(capacities), sum(capacities)
        if largest == 0:
            return [f"no node holds even one slot: {self._short()}"]
        if largest < max(self.blocks):
            return [
                f"largest block that would fit on a node: {largest}. Split the blocks (the nodes hold "
                f"{total} slots in all), or add a node that holds {max(self.blocks)} slots"
            ]
        if total < self.slots:
            return [f"the nodes hold {total} slots in all: ask for {self.slots - total} fewer, or add nodes"]
        return [
            f"the nodes hold {total} slots, but these blocks cannot be spread over them without breaking "
            f"one: use smaller blocks; per node {sorted(capacities, reverse=True)} slots would fit"
        ]

    def _short(self) -> str:
        most = {name: max(node.total.get(name, 0) for node in self.nodes) for name in self.resources}
        lacks = [
            f"a slot wants {name} {amount_text(name, amount)}, the most on a node is "
            f"{amount_text(name, most[name])}"
            for name, amount in self.resources.items()
            if _units(most[name]) < _units(amount)
        ]
        return (
            f"{'; '.join(lacks) or 'no node has all that a slot wants'}. Ask for less per slot, or add a node"
        )

    def _busy(self) -> list[str]:
        holding = sorted(
            {h.name for h in self.holders if any(name in h.resources for name in self.resources)}
        )
        free = max(capacity(node.available, self.resources) for node in self.nodes)
        who = (
            f" held by {', '.join(holding)}"
            if holding
            else " in use by work outside Phalanx (see `ray status`)"
        )
        return [
            f"enough slots would be free if nothing were held; needed resources are{who}: close what is no longer "
            "needed, put the group on a pool that exists already (groups can share it), or wait longer with timeout=",
            f"largest block that fits on a node right now: {free}",
        ]


def amounts_text(resources: Resources) -> str:
    """Return the nonzero amounts as text, such as ``GPU 4, CPU 0.08``; memory in GiB."""
    return ", ".join(f"{name} {amount_text(name, amount)}" for name, amount in resources.items() if amount)


def amount_text(resource: str, amount: float) -> str:
    """Return an amount as text, with at most four decimals; memory in GiB."""
    if resource in _BYTES:
        return f"{round(amount / 2**30, 3):g} GiB"
    return f"{round(amount, 4):g}"


def _units(amount: float) -> int:
    return round(amount * _UNITS)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fits(blocks: Sequence[int], capacities: Sequence[int]) -> bool:
    """Return whether each block may fit on a single node; ``capacities`` are in slots. Blocks may share a node.

    Numbers and sums are compared: False is certain. True is certain if each size is a multiple of the smaller sizes.
    """
    for size in set(blocks) - {0}:
        large = [block for block in blocks if block >= size]
        nodes = [free for free in capacities if free >= size]
        parts = sum(block // size for block in large)  # nodes are cut into parts of this size, too
        if parts > sum(free // size for free in nodes) or sum(large) > sum(nodes):
            return False
    return True
