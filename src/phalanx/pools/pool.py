"""Resource pools: ordered slots that groups are started on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from phalanx.config import is_whole
from phalanx.display.tables import Table
from phalanx.errors import DeclarationError, PlacementError
from phalanx.pools.slot_reservation import SlotReservation, Tenant, books, check_options, resource_of
from phalanx.session.session import session
from phalanx.topology.placement import bundle_resources
from phalanx.topology.slots import Slot, SlotInfo, SlotView, checked_shape, order_ranks, slots_of
from phalanx.wire.value import Reduced, checked_number


class ResourcePool:
    """Slots for ranks: ``ResourcePool([8, 8])`` is two blocks of 8, each on a single node.

    Args:
        process_on_nodes: size of each block. A block stays on one node; blocks may share a node. All are reserved
            or none.
        use_gpu: True, False, or "auto": accelerators if the cluster has any now.
        name_prefix: beginning of the pool's name in tables and dashboards.
        max_colocate_count: number of groups that may share each slot; a process's share of an accelerator is 1 / that
            number.
        accelerator_type: only nodes with this type, such as "A100" (Ray's names).
        accelerators_per_slot: whole accelerators of a slot, for an engine that runs several in the same process.
        detached: the slots outlive this driver; see ``px.attach``.
        timeout: seconds to wait if the cluster is busy, or adds nodes; a pool too large for the cluster fails at once.
        backend: "ray" or "inline"; default the backend of ``px.init``, else ``PHALANX_BACKEND``, else "ray".

    Raises:
        DeclarationError: if an option has a wrong type or value.
        PlacementError: if the cluster cannot hold the pool, or not within ``timeout`` seconds; with a table of the
            request, the capacity of each node and the holders.
    """

    _owner = False  # it reserved its slots
    _whole = False  # complete blocks: their slots are sorted once the accelerators are known
    #: Names of the reservations whose slots keep their order from now on.
    _sorted: frozenset[str] = frozenset()

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool | Literal["auto"] = "auto",
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        accelerator_type: str | None = None,
        accelerators_per_slot: int = 1,
        detached: bool = False,
        timeout: float = 120.0,
        backend: str | None = None,
    ) -> None:
        shape = checked_shape(process_on_nodes)
        check_options(use_gpu, name_prefix)
        advice = "expected a whole number from 1; use_gpu=False makes slots without accelerators"
        accelerators = checked_number("ResourcePool: accelerators_per_slot", accelerators_per_slot, 1, advice)
        chosen = session.get_backend(backend)
        resource = resource_of(chosen, use_gpu)
        number = next(session.pool_numbers)
        name = f"{name_prefix or 'pool'}-{number}"
        # A template without slots, whose reserve() makes reservations of the same kind.
        kind = SlotReservation(
            backend=chosen,
            bundle=bundle_resources(resource, accelerators, accelerator_type),
            resource=resource,
            max_colocate_count=checked_number("ResourcePool: max_colocate_count", max_colocate_count, 1),
            accelerators_per_slot=accelerators if resource else 0,
            detached=detached,
        )
        holding = kind.reserve(name, shape, timeout)
        self._grown = itertools.count(2)
        self.number = number
        self._become(name, slots_of(shape, name), {name: holding})
        self._owner = self._whole = True
        session.add_pool(self)

    def _become(self, name: str, view: SlotView, holdings: dict[str, SlotReservation]) -> ResourcePool:
        self.name = name
        self._view = view
        self.holdings = holdings  # the reservations of its slots, by `Slot.pool`
        self.backend_api = next(iter(holdings.values())).backend  # holds its slots
        return self

    @classmethod
    def of(cls, name: str, view: SlotView, holdings: dict[str, SlotReservation]) -> ResourcePool:
        """Return a view over slots that are reserved already."""
        return cls.__new__(cls)._become(name, view, holdings)

    @property
    def world_size(self) -> int:
        """Number of slots, and of ranks of a group on this pool."""
        return self._view.world_size

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Index of each rank in its block, by rank."""
        return self._view.local_ranks

    @property
    def local_world_sizes(self) -> tuple[int, ...]:
        """Size of the block of each rank, by rank."""
        return self._view.local_world_sizes

    @property
    def backend(self) -> str:
        """Name of the backend that runs the ranks."""
        return self.backend_api.name

    @property
    def closed(self) -> bool:
        """True if any of its slots were released, or will be."""
        return not all(holding.open for holding in self.holdings.values())

    @property
    def use_gpu(self) -> bool:
        """True if its slots have accelerators."""
        return any(holding.resource is not None for holding in self.holdings.values())

    @property
    def groups(self) -> tuple[Tenant, ...]:
        """The groups on any of its slots, in the order in which they were started."""
        found = {group for slot in self.slots for group in self.holdings[slot.pool].groups.get(slot, ())}
        return tuple(sorted(found, key=lambda group: group.number))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Its slots in rank order."""
        return self._view.slots

    def __len__(self) -> int:
        return self.world_size

    def __add__(self, other: ResourcePool) -> ResourcePool:
        """Return a view over the slots of this pool, then those of ``other``; groups share accelerators.

        Raises:
            DeclarationError: the pools share a slot, or belong to different backends.
        """
        if not isinstance(other, ResourcePool):
            return NotImplemented
        if self.backend_api is not other.backend_api:
            raise DeclarationError(
                f"cannot merge a pool of backend {self.backend!r} with one of {other.backend!r}; make both pools "
                "with the same backend=, after px.init"
            )
        holdings = {**self.holdings, **other.holdings}
        merged = ResourcePool.of(f"{self.name}+{other.name}", self._view + other._view, holdings)
        merged._whole = self._whole and other._whole
        return merged

    def __getitem__(self, key: int | slice) -> ResourcePool:
        """Return a view over some slots, in rank order: ``pool[0:4]``."""
        self.locate()
        return self._sub(self._view[key])

    def split(self, sizes: int | Sequence[int]) -> tuple[ResourcePool, ...]:
        """Return views over consecutive slots: of ``sizes`` slots each or, if it is a list, of the listed sizes."""
        self.locate()
        return tuple(self._sub(part) for part in self._view.split(sizes))

    def _sub(self, view: SlotView) -> ResourcePool:
        names = {slot.pool for slot in view.slots}
        return ResourcePool.of(self.name, view, {n: h for n, h in self.holdings.items() if n in names})

    def first(self, count: int) -> ResourcePool:
        """Return a view over the first ``count`` slots, in their present order; the pool itself if these are all."""
        return self if count == self.world_size else self._sub(self._view[0:count])

    def locate(self) -> None:
        """Learn the accelerator of each slot and put the slots in rank order.

        The first group on a complete pool reports this at no cost. Views need it earlier, so that a slice has the same
        devices whichever group is started first.
        """
        self._check_open()
        self._forget_moved()
        for name, holding in self.holdings.items():
            with holding.lock:
                unknown = [s for s in self._view.slots if s.pool == name and s not in holding.accelerators]
                if unknown and holding.resource is not None:
                    ids = holding.backend.probe(unknown, {name: holding.reservation}, holding.bundle)
                    holding.accelerators.update(zip(unknown, ids, strict=True))
        self._sort()

    def _forget_moved(self) -> None:
        """Forget the facts about slots that are on another node now."""
        slots = self.slots  # another thread may grow the pool
        for slot, node in zip(slots, self.nodes_of(slots), strict=True):
            holding = self.holdings[slot.pool]
            if slot in holding.facts and holding.facts[slot].node_id != node:
                del holding.facts[slot]
                holding.accelerators.pop(slot, None)

    def _sort(self) -> None:
        """Sort the slots of complete blocks by their accelerators, until these are known. A slice keeps its order.

        A block that moves to another node keeps its order, too, since its ranks stay on their slots.
        """
        if self._whole:
            with books:  # another thread may grow the pool
                slots, known = self._view.slots, {n: dict(h.accelerators) for n, h in self.holdings.items()}
                ids = [() if slot.pool in self._sorted else known[slot.pool].get(slot, ()) for slot in slots]
                self._sorted |= {n for n, h in self.holdings.items() if len(known[n]) == sum(h.blocks)}
                self._view = SlotView(tuple(slots[index] for index in order_ranks(slots, ids)))

    def learn(self, facts: Mapping[Slot, SlotInfo]) -> tuple[Slot, ...]:
        """Store the reports of processes on the slots; return the slots in rank order, which depends on the reports."""
        for slot, fact in facts.items():
            holding = self.holdings[slot.pool]
            holding.facts[slot] = fact
            # A process may see only one of several. A slot of a lost node may have others now.
            if holding.resource and len(fact.accelerator_ids) >= len(holding.accelerators.get(slot, ())):
                holding.accelerators[slot] = fact.accelerator_ids
        self._sort()
        return self._view.slots

    def repair(self, timeout: float, idle: bool = False) -> None:
        """Reserve its slots on lost or draining nodes again; stored facts about them are forgotten.

        With ``idle``, blocks with groups stay as they are.

        Raises:
            PlacementError: if there is no capacity for them.
        """
        self._check_open()
        for name, holding in self.holdings.items():
            blocks = {slot.block for slot in self._view.slots if slot.pool == name}
            # A copy, since other threads start groups.
            used = {slot.block for slot, groups in [*holding.groups.items()] if groups and idle}
            with holding.lock:
                holding.backend.repair(holding.reservation, blocks - used, timeout)
        self._forget_moved()

    def nodes_of(self, slots: Sequence[Slot]) -> list[str]:
        """Return the node id of each of these slots of the pool."""
        reservations = {name: holding.reservation for name, holding in self.holdings.items()}
        return self.backend_api.nodes_of(slots, reservations)

    def explain(self) -> Table:
        """Return a table of the slots with their nodes and groups."""
        slots = self.slots
        nodes = () if self.closed else self.nodes_of(slots)
        rows: list[tuple[Any, ...]] = []
        for rank, slot in enumerate(slots):
            holding = self.holdings[slot.pool]
            known = holding.facts.get(slot)
            groups = [group.name for group in holding.groups.get(slot, ())]
            node = nodes[rank][:8] if nodes else None
            where = (known.host if known else None, node, holding.accelerator_text(slot))
            used = f"{len(groups)} of {holding.max_colocate_count}"
            rows.append((rank, slot.pool, slot.block, self.local_ranks[rank], *where, used, groups))
        head = ("rank", "pool", "block", "local rank", "host", "node", "accelerator", "shares used", "groups")
        return Table(f"pool {self.name}: {self.world_size} slots", head, tuple(rows))

    def close(self) -> None:
        """Close every group on these slots, and release the slots if this pool reserved them. Idempotent."""
        own = self.holdings.values() if self._owner else ()
        with books:
            for holding in own:
                holding.open = False  # no group can claim its slots any more
        for group in reversed(self.groups):
            group.close()
        for holding in own:
            holding.close()
        session.forget_pool(self)

    def let_go(self, everything: bool = False) -> None:
        """Close the pool before its cluster is left; detached slots stay reserved unless ``everything`` is true."""
        try:
            if self.backend_api.connected() and (everything or not self._is_detached):
                self.close()
        finally:
            for holding in self.holdings.values():
                holding.close(release=False)
            session.forget_pool(self)

    @property
    def _is_detached(self) -> bool:
        return any(holding.detached for holding in self.holdings.values())

    def grow(self, process_on_nodes: int | Sequence[int] = 1, timeout: float = 120.0) -> None:
        """Reserve more slots after the present slots: ``pool.grow([8, 8])`` adds two blocks of 8.

        Groups stay as they are until ``px.resize``. Earlier views do not have the new slots.

        Raises:
            PlacementError: if the cluster cannot hold them, or not within ``timeout`` seconds; nothing has changed.
            DeclarationError: if this is a view, or a detached pool.
        """
        self._check_own("grow")
        blocks = [process_on_nodes] if is_whole(process_on_nodes) else process_on_nodes
        shape, first, number = checked_shape(blocks), self.holdings[self.name], next(self._grown)
        name = f"{first.pool}.{number}"
        added = first.reserve(name, shape, timeout)
        with books:
            self.holdings = {**self.holdings, name: added}
            self._view = self._view + slots_of(shape, name)

    def shrink(self) -> None:
        """Release the slots that the last ``grow()`` reserved.

        Raises:
            PlacementError: if groups are on these slots; the message names the groups, and says how to proceed.
            DeclarationError: if this is a view or a detached pool, or the pool has not grown.
        """
        self._check_own("shrink")
        *kept, last = self.holdings
        if not kept:
            raise DeclarationError(
                f"{self!r}.shrink(): it has only the slots that it was created with; close() releases all of its slots"
            )
        with books:
            added = self.holdings[last]
            groups = {group.name for on_it in added.groups.values() for group in on_it}
            if not groups:
                self._view = SlotView(tuple(slot for slot in self._view.slots if slot.pool != last))
                self.holdings = {name: self.holdings[name] for name in kept}
                added.open = False  # no group can claim these slots any more
        if groups:  # the lock is free again: the table asks the cluster
            raise PlacementError(
                f"pool {self.name} cannot shrink: {', '.join(sorted(groups))} would lose slots. "
                f"px.resize(group, {self.world_size - sum(added.blocks)}) frees the slots of a group whose ranks are "
                f"independent; close other groups\n{self.explain()}"
            )
        added.close()

    def _check_own(self, verb: str) -> None:
        self._check_open()
        if not self._owner or self._is_detached:
            kind = "detached" if self._owner else "a view of another pool's slots"
            raise DeclarationError(
                f"{self!r}.{verb}(): it is {kind}; {verb} one made by px.ResourcePool(...)"
            )

    def keep(self) -> None:
        """Keep the slots until they are released, even if no reference to the pool is left in this process."""
        if not self.closed:
            session.kept_pools.add(self)

    def __enter__(self) -> ResourcePool:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        kind = next((h.resource for h in self.holdings.values() if h.resource), "CPU")
        return f"<ResourcePool {self.name}: {[*map(len, self._view.blocks)]} {kind} slots{state}>"

    def __reduce__(self) -> Reduced:
        raise DeclarationError(
            "a ResourcePool belongs to the driver that made it and cannot be sent to another process; send the "
            "WorkerGroup (it travels as a view), or make the pool detached and use px.attach there"
        )

    def _check_open(self) -> None:
        if self.closed:
            raise PlacementError(
                f"pool {self.name} is closed: its slots were given back; make a new px.ResourcePool"
            )

    def claim(self, group: Tenant, slots: Sequence[Slot] | None = None) -> None:
        """Claim a share of every slot, or of ``slots``, for a group, unless the group has a share already.

        Raises:
            PlacementError: if the pool is closed, or a slot has no share left; nothing was claimed.
        """
        wanted = self._view.slots if slots is None else slots
        with books:
            self._check_open()
            booked = {slot: self.holdings[slot.pool].groups[slot] for slot in wanted}
            for slot, on_it in booked.items():
                most = self.holdings[slot.pool].max_colocate_count
                if group not in on_it and len(on_it) >= most:
                    raise PlacementError(
                        f"group {group.name!r} does not fit on {slot}: it holds {len(on_it)} of "
                        f"max_colocate_count={most} groups already "
                        f"({', '.join(g.name for g in on_it)}); close one of them, or make the pool with a larger "
                        "max_colocate_count"
                    )
            for on_it in booked.values():
                if group not in on_it:
                    on_it.append(group)

    def unclaim(self, group: Tenant, slots: Sequence[Slot] | None = None) -> None:
        """Release a group's shares of all slots, or of ``slots``. Idempotent."""
        with books:
            for slot in self._view.slots if slots is None else slots:
                on_it = self.holdings[slot.pool].groups[slot]
                if group in on_it:
                    on_it.remove(group)
