"""Where standbys are, and who takes which: decided without a cluster."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from phalanx.runtime.life.standing import allowed, assigned, berths, told

NODES = st.sampled_from("abcd")


def test_they_are_on_the_nodes_in_turn_where_most_slots_are_first() -> None:
    assert berths("actor", ["a", "b", "b"], [9, 9, 9], 3) == [1, 0, 2]


def test_on_a_node_they_are_where_most_shares_are_free() -> None:
    assert berths("actor", ["a", "a"], [1, 5], 3) == [1, 1, 1]


def test_a_full_node_is_passed_over() -> None:
    assert berths("actor", ["a", "b"], [0, 2], 2) == [1, 1]


def test_too_few_shares_are_said_with_what_to_do() -> None:
    with pytest.raises(px.PlacementError, match=r"standbys=2.*have 1 left.*max_colocate_count"):
        berths("actor", ["a", "b"], [0, 1], 2)


@given(st.lists(st.tuples(NODES, st.integers(0, 3)), min_size=1), st.integers(0, 9))
def test_no_slot_gets_more_than_it_has_and_nodes_are_used_evenly(
    slots: list[tuple[str, int]], wanted: int
) -> None:
    nodes, free = [node for node, _ in slots], [count for _, count in slots]
    if sum(free) < wanted:
        return
    found = berths("actor", nodes, free, wanted)

    assert len(found) == wanted
    assert all(count <= free[slot] for slot, count in Counter(found).items())
    on = Counter(nodes[slot] for slot in found)
    room = {node: sum(f for n, f in slots if n == node) for node in nodes}
    assert all(on[node] + 1 >= max(on.values(), default=0) for node in nodes if on[node] < room[node])


def test_a_rank_takes_a_standby_of_its_node_one_that_is_ready_first() -> None:
    assert assigned({3: "b", 1: "a", 2: "b"}, {0: "b", 1: "b", 2: "c"}, ready={1}) == {2: 1, 3: 0}


@given(st.dictionaries(st.integers(0, 9), NODES), st.dictionaries(st.integers(0, 9), NODES))
def test_nobody_gets_one_of_another_node_and_none_is_left_that_fits(
    lost: dict[int, str], there: dict[int, str]
) -> None:
    found = assigned(lost, there, ready=())

    assert len(set(found.values())) == len(found)
    assert all(lost[rank] == there[one] for rank, one in found.items())
    without = {lost[rank] for rank in lost if rank not in found}
    assert not without & {there[one] for one in there if one not in found.values()}


def test_three_losses_for_each_within_the_window_are_the_last() -> None:
    assert allowed([0.0, 1.0], 2.0, 600.0, 1)
    assert not allowed([0.0, 1.0, 2.0], 2.0, 600.0, 1)
    assert allowed([0.0, 1.0, 2.0], 700.0, 600.0, 1)


def test_how_many_there_are_in_words() -> None:
    assert told(["ready", "starting"], "") == "1 of 2 standbys ready, 1 starting"
    assert told(["missing"], "it died") == "0 of 1 standbys ready, 1 missing (it died)"
