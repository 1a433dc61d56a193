"""Any layout to any other: what a plan moves is, bit for bit, what torch itself would have cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.weights.boxes import volume
from phalanx.weights.plan import Locations, Plan, RankLocation
from tests.weights.planning.layouts import (
    Layout,
    blank,
    layouts,
    locals_of,
    manifests,
    model,
    plan_of,
    run_in_process,
    shapes,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
slow_to_draw = settings(
    max_examples=18, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def places(source: Layout, target: Layout, per_node: int) -> Locations:
    """Sources and targets side by side; those of one number share a process, as roles that are colocated do."""
    both = [RankLocation(f"node {rank // per_node}", f"process {rank}") for rank in range(128)]
    return Locations(tuple(both[: source.ranks]), tuple(both[: target.ranks]))


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def planned(source: Layout, target: Layout, named: dict[str, torch.Tensor], per_node: int) -> Plan:
    return plan_of(
        manifests(source, named), manifests(target, named), places=places(source, target, per_node)
    )


@slow_to_draw
@given(layouts, layouts, shapes, st.integers(1, 8))
def test_every_element_of_a_layout_arrives_in_every_other_and_travels_once(
    source: Layout, target: Layout, sizes: list[list[int]], per_node: int
) -> None:
    named = model(sizes)
    wanted = locals_of(target, named)
    arrived = blank(wanted)
    plan = planned(source, target, named, per_node)

    run_in_process(plan, locals_of(source, named), arrived)

    assert same(arrived, wanted)
    travelled = [0] * target.ranks
    for _, _, piece in plan.transfers():
        for rank in piece.targets:
            travelled[rank] += volume(piece.box)
    assert travelled == [sum(one.numel() for one in rank.values()) for rank in wanted]
