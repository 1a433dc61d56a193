"""Who holds the copy of whose state, and what is lost with whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from phalanx.group.snapshot_placement import holders, lost_copies


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=40))
def test_every_rank_has_a_holder_that_is_another_one_on_another_node_where_there_is_one(
    nodes: list[str],
) -> None:
    held_by = holders(nodes)
    for rank, holder in enumerate(held_by):
        assert holder != rank
        assert nodes[holder] != nodes[rank] or len(set(nodes)) == 1


@given(st.integers(1, 5), st.integers(1, 8))
def test_nodes_with_as_many_ranks_each_hold_as_many_copies(count: int, each: int) -> None:
    held_by = holders([f"n{node}" for node in range(count) for _ in range(each)])
    assert set(Counter(held_by).values()) == {1}


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12), st.data())
def test_a_state_is_lost_with_its_rank_and_its_holder_alone(nodes: list[str], data: st.DataObject) -> None:
    held_by = holders(nodes)
    gone = data.draw(st.sets(st.integers(0, len(nodes) - 1)))
    lost = lost_copies(held_by, gone)
    assert lost_copies(holders(["a"]), {0}) == [0]  # a rank alone has nobody to hold its state
    assert all(rank in gone and held_by[rank] in gone for rank in lost)
    assert all(held_by[rank] not in gone for rank in gone if rank not in lost)
