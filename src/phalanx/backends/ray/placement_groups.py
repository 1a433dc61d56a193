"""Pools on Ray: a placement group per block, checked before waiting for resources; and nodes that Ray drains.

A signal to a node (a spot machine that is shut down, a pod that is deleted, ``ray stop``) ends its raylet and all
ranks there at once: they cannot be moved in time. But the raylet reports the reason, which distinguishes the loss from
a crash. A signal to a rank alone is a failure of that rank, because Ray itself sends signals to workers.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.backends.backend_types import DrainingNode, Reservation, ReserveRequest, StoreSpace
from phalanx.backends.ray import private
from phalanx.backends.ray.ray_errors import node_is_gone
from phalanx.display.text_format import first_of
from phalanx.errors import PlacementError
from phalanx.topology.placement import Holder, NodeCapacity, PlacementTable, Resources, fits_on
from phalanx.topology.slots import Slot

NODE_LABEL = "ray.io/node-id"
_PROBED_WITHIN_S = 60.0


def store_space() -> StoreSpace | None:
    """Return the space of this node's object store, which Ray reports every 100 ms; None: Ray does not report it."""
    node = private.runtime_context().get_node_id()
    capacity = private.total_resources().get(node, {}).get("object_store_memory")
    free = private.free_resources().get(node, {}).get("object_store_memory", 0.0)
    return None if capacity is None else StoreSpace(int(capacity), int(free))


def nodes() -> list[NodeCapacity]:
    """Return the living nodes with their total and free resources."""
    free = private.free_resources()
    return [
        NodeCapacity(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            total=_plain(node["Resources"]),
            available=_plain(free.get(node["NodeID"], {})),
        )
        for node in private.nodes()
        if node["Alive"]
    ]


def _plain(resources: Resources) -> dict[str, float]:
    """Return resources without Ray's entries for placement groups (GPU_group_1_<id>) and node addresses."""
    return {
        key: value for key, value in resources.items() if "_group_" not in key and not key.startswith("node:")
    }


def holders() -> list[Holder]:
    """Return the placement groups that hold resources, by node."""
    found = list[Holder]()
    for table in private.placement_group_table().values():
        if table["state"] != "CREATED":
            continue
        by_node = defaultdict[str, Counter[str]](Counter)
        for index, node_id in table["bundles_to_node_id"].items():
            by_node[node_id].update(table["bundles"][index])
        name = table["name"] or f"placement group {table['placement_group_id'][:8]}"
        found += [Holder(name, node_id, resources) for node_id, resources in by_node.items()]
    return found


def reserve(request: ReserveRequest) -> Reservation:
    """Reserve all blocks or none.

    Raises:
        PlacementError: at once if the cluster is too small for the request, else after ``request.timeout`` s.
    """
    deadline = time.monotonic() + request.timeout
    if request.strategy == "STRICT_PACK" and not _can_fit(request):
        raise PlacementError(_table(request, "can never be placed on this cluster"))
    reservation = Reservation(request)
    try:
        for index in range(len(request.blocks)):
            _reserve_block(reservation, request, index)
        for group in reservation.ids:
            _wait(request, group, deadline)
    except BaseException:
        release(reservation.keys)
        raise
    return reservation


def _reserve_block(reservation: Reservation, request: ReserveRequest, index: int) -> None:
    """Request a placement group for a block, and put it into the reservation (in place of the block's former group)."""
    size = request.blocks[index]
    selector: Any = [{NODE_LABEL: request.on_nodes[index]}] * size if request.on_nodes else None
    group = private.placement_group(
        [dict(request.bundle)] * size,
        strategy=request.strategy,
        name=request.names[index] if request.names else f"{request.name}-{index}",
        lifetime="detached" if request.detached else None,
        bundle_label_selector=selector,
    )
    reservation.ids[index : index + 1] = [group]
    reservation.keys[index : index + 1] = [group.id.hex()]


def _wait(request: ReserveRequest, group: PlacementGroup, deadline: float) -> None:
    """Poll until a placement group is created; Ray's own wait would hang if another thread leaves the cluster."""
    pause = 0.002
    while True:
        table = dict[str, Any]()
        with contextlib.suppress(Exception):  # the cluster was left
            table = private.placement_group_table(group)
        state = table.get("state", "REMOVED")
        if state == "CREATED":
            return
        if state == "REMOVED":
            raise PlacementError(
                f"{request.name}: px.shutdown() or ray.shutdown() in another thread, or another program, removed its "
                "placement group while it waited for free slots; reserve the slots again after that"
            )
        if table.get("stats", {}).get("scheduling_state") == "INFEASIBLE" and not _autoscales(group):
            raise PlacementError(_table(request, "can never be placed on this cluster"))
        if time.monotonic() >= deadline:
            raise PlacementError(_table(request, f"could not be placed within timeout={request.timeout:g} s"))
        time.sleep(pause)
        pause = min(pause * 1.5, 0.2)


def _usable(on_nodes: Sequence[str] = ()) -> list[NodeCapacity]:
    """Return the living nodes, of ``on_nodes`` if given, on which Ray starts processes: not draining nodes."""
    going = {node.node_id for node in draining_nodes()}
    return [
        node for node in nodes() if node.node_id not in going and (not on_nodes or node.node_id in on_nodes)
    ]


def _can_fit(request: ReserveRequest) -> bool:
    """Return whether the request may fit if the nodes were free, or the cluster can still grow."""
    totals = [node.total for node in _usable(request.on_nodes)]
    return fits_on(totals, request.blocks, request.bundle) or _autoscales()


def _autoscales(group: PlacementGroup | None = None) -> bool:
    """Return whether an autoscaler may add nodes, and has not reported that it has none for a placement group."""
    with contextlib.suppress(Exception):  # private to Ray: if it fails, assume no autoscaler
        state = private.autoscaling_state()
        is_refused = group is not None and group.id.hex() in str(state.infeasible_gang_resource_requests)
        return state.autoscaler_state_version > 0 and not is_refused
    return False


def _table(request: ReserveRequest, verdict: str) -> str:
    table = PlacementTable(_usable(request.on_nodes), request.blocks, request.bundle, holders())
    return f"{request.name}: {verdict}\n{table}"


def repair(reservation: Reservation, blocks: Collection[int], timeout: float) -> None:
    """Reserve again those ``blocks`` whose node was lost or is drained.

    Raises:
        PlacementError: if these blocks do not fit. They stay lost, and another repair is possible.
    """
    request = reservation.request
    if request is None:
        return
    deadline = time.monotonic() + timeout
    lost = [index for index in sorted(blocks) if _lost(reservation.ids[index], deadline)]
    if lost:
        part = replace(request, blocks=tuple(request.blocks[index] for index in lost), timeout=timeout)
        release([reservation.keys[index] for index in lost])
        if not _can_fit(part):
            raise PlacementError(
                _table(part, "other nodes have no capacity for all slots of lost or draining nodes")
            )
        for index in lost:
            _reserve_block(reservation, request, index)
        for index in lost:
            _wait(part, reservation.ids[index], deadline)


def _lost(group: PlacementGroup, deadline: float) -> bool:
    """Return whether the node of a block is drained or lost.

    Waits until Ray has noticed the loss, because Ray might place the block there again before that.
    """
    table = private.placement_group_table(group)
    on = set((table.get("bundles_to_node_id") or {}).values())
    while any(map(node_is_gone, on)):
        if not on <= {node.node_id for node in nodes()} or time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return table.get("state") != "CREATED" or not on <= {node.node_id for node in _usable()}


def release(keys: Sequence[str]) -> None:
    """Remove placement groups, including those of other drivers, and wait up to 5 s until Ray has removed them."""
    if not private.is_connected():
        return
    groups = [PlacementGroup(PlacementGroupID(bytes.fromhex(key))) for key in keys]
    for group in groups:
        private.remove_placement_group(group)
    deadline = time.monotonic() + 5.0
    for group in groups:
        while private.placement_group_table(group).get("state") != "REMOVED" and time.monotonic() < deadline:
            time.sleep(0.002)


def nodes_of(slots: Sequence[Slot], reservations: Mapping[str, Any]) -> list[str]:
    """Return the node id of each slot, from Ray's table of placement groups."""
    table = functools.cache(private.placement_group_table)
    return [
        table(reservations[slot.pool].ids[slot.block])["bundles_to_node_id"][slot.bundle] for slot in slots
    ]


def strategy(slot: Slot, reservations: Mapping[str, Any]) -> PlacementGroupSchedulingStrategy:
    """Return the scheduling strategy that places an actor in this slot."""
    return PlacementGroupSchedulingStrategy(
        reservations[slot.pool].ids[slot.block], placement_group_bundle_index=slot.bundle
    )


def probe(slots: Sequence[Slot], reservations: Mapping[str, Any], bundle: Resources) -> list[tuple[str, ...]]:
    """Return the accelerator ids of each slot, reported by a short task that uses all accelerators of the slot.

    Raises:
        PlacementError: if a slot does not report within 60 s.
    """
    task = ray.remote(private.accelerator_ids)
    gpus = bundle.get("GPU", 0)
    others = {key: value for key, value in bundle.items() if key not in ("GPU", "CPU") and ":" not in key}
    refs = [
        task.options(
            num_cpus=0,
            num_gpus=gpus,
            resources=others or None,
            scheduling_strategy=strategy(slot, reservations),
        ).remote()
        for slot in slots
    ]
    if late := private.wait(refs, num_returns=len(refs), timeout=_PROBED_WITHIN_S)[1]:
        for ref in late:
            private.cancel(ref)
        asked = ", ".join(f"{amount:g} {name}" for name, amount in {"GPU": gpus, **others}.items() if amount)
        raise PlacementError(
            f"which accelerators {first_of([slots[refs.index(ref)] for ref in late], 3)} have is not known: a task "
            f"that asks for {asked or 'nothing'} there has not run within {_PROBED_WITHIN_S:g} s. "
            "The node may be lost or overloaded, or something that is not of this library holds the slot: look at `ray "
            "status`; a first group on the whole pool, not on a view of it, needs no such task"
        )
    return private.get(refs)


def draining_nodes(ended: bool = False) -> list[DrainingNode]:
    """Return the nodes that are being drained: before a preemption, by an autoscaler, or by ``ray drain-node``.

    With ``ended``, return also the nodes that were lost because a signal or an autoscaler ended them.
    """
    found = [
        DrainingNode(str(node), deadline / 1000.0 if deadline else None, "Ray drains its node")
        for node, deadline in private.draining_nodes().items()
    ]
    if ended:
        found += [
            DrainingNode(node["NodeID"], None, f"its node was terminated: {node.get('DeathReasonMessage')}")
            for node in private.nodes()
            if not node["Alive"] and node.get("DeathReason") in private.TERMINATED
        ]
    return found
