"""Placement of blocks on nodes, and the table that explains a failure."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DeclarationError
from phalanx.topology.placement import (
    Holder,
    NodeCapacity,
    PlacementTable,
    bundle_resources,
    fits,
    fits_on,
    share,
)

ONE_GPU = {"GPU": 1.0}


def node(name: str, gpus: float = 0, free: float | None = None) -> NodeCapacity:
    total = {"CPU": 2.0, **({"GPU": float(gpus)} if gpus else {})}
    available = {"CPU": 2.0, **({"GPU": float(gpus if free is None else free)} if gpus else {})}
    return NodeCapacity(name * 10, f"host-{name}", total, available)


def fits_by_trying_all(blocks: list[int], capacities: list[int]) -> bool:
    return any(
        all(
            sum(size for size, at in zip(blocks, choice, strict=True) if at == n) <= room
            for n, room in enumerate(capacities)
        )
        for choice in itertools.product(range(len(capacities)), repeat=len(blocks))
    )


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6), st.lists(st.integers(0, 8), min_size=1, max_size=4)
)
def test_blocks_that_fit_are_never_refused(blocks: list[int], capacities: list[int]):
    assert fits(blocks, capacities) or not fits_by_trying_all(blocks, capacities)


@given(
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=6),
    st.lists(st.integers(0, 14), min_size=1, max_size=4),
)
def test_blocks_whose_sizes_divide_each_other_are_accepted_exactly_if_they_fit(
    unit: int, multiples: list[int], capacities: list[int]
):
    blocks = [unit * multiple for multiple in multiples]

    assert fits(blocks, capacities) == fits_by_trying_all(blocks, capacities)


@pytest.mark.parametrize(
    ("nodes", "blocks", "slot", "expected"),
    [
        pytest.param([node("a", 6), node("b", 2)], [4, 4], ONE_GPU, (False, False), id="blocks stay whole"),
        pytest.param([node("a", 8)], [4, 4], ONE_GPU, (True, True), id="blocks share a node"),
        pytest.param([node("a", 11), node("b", 13)], [7, 7, 5, 5], ONE_GPU, (True, True), id="uneven blocks"),
        pytest.param([node("a", 8, free=3)], [4], ONE_GPU, (True, False), id="what is held counts for now"),
        pytest.param(
            [node("a", 8)], [4], {"GPU": 1.0, "CPU": 1.0}, (False, False), id="each resource counts"
        ),
        pytest.param([node("a")], [8], bundle_resources(None), (True, True), id="eight slots on two cores"),
        pytest.param(
            [NodeCapacity("n", "h", {"CPU": 0.3}, {"CPU": 0.1 + 0.2})],
            [3],
            {"CPU": 0.1},
            (True, True),
            id="fractions",
        ),
    ],
)
def test_feasibility_is_checked_for_total_and_for_free_resources(nodes, blocks, slot, expected):
    total, free = [node.total for node in nodes], [node.available for node in nodes]
    assert (fits_on(total, blocks, slot), fits_on(free, blocks, slot)) == expected


@given(st.integers(1, 10_000), st.sampled_from([0.01, 1.0, 3.0]))
def test_shares_are_whole_units_and_all_of_them_fit(count: int, amount: float):
    units = share(count, amount) * 10_000

    assert abs(units - round(units)) < 1e-6
    assert round(units) * count <= 10_000 * amount
    assert amount < 1 or round(units) >= 1


@pytest.mark.parametrize(
    ("given", "bundle"),
    [
        ((None,), {"CPU": 0.01}),
        (("GPU",), {"GPU": 1.0}),
        (("GPU", 4), {"GPU": 4.0}),
        (("GPU", 1, "A100"), {"GPU": 1.0, "accelerator_type:A100": 0.001}),
        (("NPU", 1, None, 2.0), {"NPU": 1.0, "CPU": 2.0}),
        ((None, 1, None, 0.5), {"CPU": 0.5}),
    ],
)
def test_a_bundle_requests_the_least_possible_resources(given, bundle):
    assert bundle_resources(*given) == bundle


@pytest.mark.parametrize("count", [0, 10_001])
def test_shares_that_are_not_from_1_to_10_000_are_refused(count: int):
    with pytest.raises(DeclarationError, match="from 1 to 10000"):
        share(count)


A100 = bundle_resources("GPU", accelerator_type="A100")
NPUS = NodeCapacity("n", "h", {"NPU": 8.0}, {"NPU": 8.0})
H100S = NodeCapacity("n", "h", {"GPU": 8, "accelerator_type:H100": 1}, {"GPU": 8})
MEMORY = NodeCapacity("n", "h", {"memory": 4 * 2.0**30}, {"memory": 2.0**30})


@pytest.mark.parametrize(
    ("nodes", "blocks", "slot", "words"),
    [
        ([], [4], ONE_GPU, ["no living node"]),
        (
            [node("a")],
            [16],
            ONE_GPU,
            ["no node has accelerators: pass use_gpu=False", "px.init(num_gpus=16)"],
        ),
        ([NPUS], [4], ONE_GPU, ["no node has a GPU, but there are NPU"]),
        ([H100S], [4], A100, ["no node has accelerator type 'A100'; present: H100"]),
        ([node("a", 6), node("b", 4)], [8], ONE_GPU, ["largest block that would fit on a node: 6"]),
        ([node("a", 6), node("b", 2)], [4, 4], ONE_GPU, ["cannot be spread", "[6, 2]"]),
        ([node("a", 4), node("b", 2)], [4, 2, 2], ONE_GPU, ["ask for 2 fewer"]),
        ([node("a", 11), node("b", 13)], [7, 7, 5, 5], ONE_GPU, ["try again, or use smaller blocks"]),
        ([node("a", 4)], [1], {"GPU": 8.0}, ["a slot wants GPU 8, the most on a node is 4"]),
        ([MEMORY], [1], {"memory": 2.0**31}, ["4 GiB/1 GiB"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value and isinstance(value[0], str) else "",
)
def test_the_table_explains_why_blocks_do_not_fit(nodes, blocks, slot, words: list[str]):
    table = str(PlacementTable(nodes, blocks, slot))

    assert all(word in table for word in words)


def test_the_table_shows_total_and_free_resources_and_holders_of_each_node():
    nodes, holders = [node("a", 8, free=2), node("b", 4)], [Holder("critic", "a" * 10, ONE_GPU)]

    lines = str(PlacementTable(nodes, [8], ONE_GPU, holders)).splitlines()

    assert lines[0].startswith("wanted: 8 slots in blocks of [8]")
    assert lines[0].endswith("GPU 1 per slot, GPU 8 in all")
    assert [line.split()[2] for line in lines[2:4]] == ["8/2", "4/4"]
    assert "critic (GPU 1)" in lines[2]
    assert "held by critic: close" in str(PlacementTable(nodes[:1], [4], ONE_GPU, holders))
