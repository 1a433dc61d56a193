"""Slots under the real verl: as verl asks for them, where the cluster has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.backends.backend_types import ReserveRequest
from phalanx.compat.verl import overlay
from phalanx.compat.verl.single_controller.ray import RayResourcePool, native
from phalanx.compat.verl.single_controller.ray import pools as pools_module
from phalanx.topology.placement import NodeCapacity


def bundle(pool: RayResourcePool, *cpus: float, active: bool = True) -> dict[str, float]:
    """What a slot of the pool asks for on a cluster of nodes with so many CPUs."""
    asked: list[ReserveRequest] = []

    def reserve(request: ReserveRequest) -> SimpleNamespace:
        asked.append(request)
        return SimpleNamespace(ids=())

    nodes = [NodeCapacity(str(index), "host", {"CPU": cpu}, {}) for index, cpu in enumerate(cpus)]
    transport = SimpleNamespace(reserve=reserve, nodes=lambda: nodes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlay, "active", lambda: active)
        patch.setattr(native, "backend", lambda: transport)
        patch.setattr(pools_module, "Connection", lambda: None)
        patch.setattr(pools_module, "resource_name", lambda device_name: "GPU")
        patch.setattr(pools_module, "sort_placement_group_by_node_ip", list)
        pool.get_placement_groups()
    return dict(asked[0].bundle)


@pytest.mark.parametrize(
    ("cpus", "active", "asked"),
    [
        ((8, 8), True, {"GPU": 1.0, "CPU": 3.0}),
        ((8,), True, {"GPU": 1.0}),  # a cluster without so many CPUs is used all the same
        ((5, 5, 5), True, {"GPU": 1.0}),
        ((64,), False, {"GPU": 1.0}),
    ],
)
def test_a_slot_holds_cpus_for_servers_as_in_verl(
    cpus: tuple[float, ...], active: bool, asked: dict[str, float]
) -> None:
    assert bundle(RayResourcePool([2, 2], max_colocate_count=3), *cpus, active=active) == asked
    assert bundle(RayResourcePool([2], use_gpu=False), 64)["CPU"] < 0.1
