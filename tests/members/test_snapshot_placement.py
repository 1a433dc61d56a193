"""Placement of the copies of states, and the states that are lost with a set of ranks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from phalanx.members.snapshots import holders, lost_copies


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=40))
def test_the_holder_of_a_copy_is_another_rank_on_another_node_if_there_is_one(nodes: list[str]) -> None:
    held_by = holders(nodes)
    for rank, holder in enumerate(held_by):
        assert holder != rank
        assert nodes[holder] != nodes[rank] or len(set(nodes)) == 1


@given(st.integers(1, 5), st.integers(1, 8))
def test_every_rank_holds_one_copy_if_all_nodes_have_equally_many_ranks(count: int, each: int) -> None:
    held_by = holders([f"n{node}" for node in range(count) for _ in range(each)])
    assert set(Counter(held_by).values()) == {1}


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12), st.data())
def test_a_state_is_lost_only_with_its_rank_and_its_holder(nodes: list[str], data: st.DataObject) -> None:
    held_by = holders(nodes)
    gone = data.draw(st.sets(st.integers(0, len(nodes) - 1)))
    lost = lost_copies(held_by, gone)
    assert lost_copies(holders(["a"]), {0}) == [0]  # a single rank has no other holder
    assert all(rank in gone and held_by[rank] in gone for rank in lost)
    assert all(held_by[rank] not in gone for rank in gone if rank not in lost)
