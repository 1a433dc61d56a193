"""The tree of relays: every rank once, nobody with too many below it, at least one on each node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.topology.relays import RelayTree, plan_relays

NODES = st.lists(st.integers(0, 12).map(str), min_size=1, max_size=300)


def leaves(tree: RelayTree) -> list[tuple[str, tuple[int, ...]]]:
    return [(relay.node, relay.ranks) for relay in tree.relays if not relay.below]


@given(NODES, st.integers(2, 40), st.integers(1, 9))
def test_every_rank_is_below_one_relay_on_its_own_node(nodes: list[str], fan_out: int, heads: int) -> None:
    tree = plan_relays(nodes, fan_out, heads)

    assert sorted(rank for _, ranks in leaves(tree) for rank in ranks) == list(range(len(nodes)))
    assert all(nodes[rank] == node for node, ranks in leaves(tree) for rank in ranks)


@given(NODES, st.integers(2, 40), st.integers(1, 9))
def test_nobody_has_more_below_than_the_fan_out_and_the_driver_no_more_than_the_heads(
    nodes: list[str], fan_out: int, heads: int
) -> None:
    tree = plan_relays(nodes, fan_out, heads)

    assert 1 <= tree.heads <= heads
    assert all(len(relay.below or relay.ranks) <= fan_out for relay in tree.relays)


@given(NODES, st.integers(2, 40), st.integers(1, 9))
def test_a_relay_reaches_what_those_below_it_reach_and_is_reached_by_one(
    nodes: list[str], fan_out: int, heads: int
) -> None:
    tree = plan_relays(nodes, fan_out, heads)

    for index, relay in enumerate(tree.relays):
        assert all(below < index for below in relay.below)
        if relay.below:
            assert relay.ranks == tuple(rank for below in relay.below for rank in tree.relays[below].ranks)
    below = [index for relay in tree.relays for index in relay.below]
    assert sorted([*below, *tree.head_indices]) == list(range(len(tree.relays)))


@pytest.mark.parametrize(
    ("ranks", "per_node", "fan_out", "most", "relays", "heads", "hops"),
    [
        (8, 8, 2, 2, 6, 2, 3),  # small enough to be tried
        (64, 64, 32, 8, 2, 2, 2),
        (24, 8, 32, 8, 3, 3, 2),
        (64, 8, 32, 8, 10, 2, 3),
        (128, 128, 32, 8, 6, 2, 3),
        (1024, 8, 32, 8, 132, 4, 3),
        (1024, 32, 32, 8, 36, 4, 3),
        (4096, 32, 32, 8, 132, 4, 3),
        (8192, 32, 32, 8, 264, 8, 3),
        (16384, 8, 32, 8, 2116, 4, 4),
    ],
)
def test_few_relays_heads_and_hops(
    ranks: int, per_node: int, fan_out: int, most: int, relays: int, heads: int, hops: int
) -> None:
    tree = plan_relays([str(rank // per_node) for rank in range(ranks)], fan_out, most)

    assert (len(tree.relays), tree.heads, tree.hops) == (relays, heads, hops)


def test_the_path_to_a_rank_begins_at_a_head_and_ends_beside_it() -> None:
    tree = plan_relays([str(rank // 4) for rank in range(64)], 4, 2)

    path = tree.above(37)

    assert path[0] in tree.head_indices
    assert tree.relays[path[-1]].ranks == (36, 37, 38, 39)


@pytest.mark.parametrize("arguments", [([], 2, 2), (["a"], 1, 2), (["a"], 2, 0)])
def test_no_tree_is_made_of_nothing(arguments: tuple[list[str], int, int]) -> None:
    with pytest.raises(ValueError, match="relays for"):
        plan_relays(*arguments)
