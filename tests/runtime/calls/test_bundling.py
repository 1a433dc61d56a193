"""Which pieces of a call are stored together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.runtime.calls.compose import bundles

MOST = 100


def made(sizes: list[int], places: str) -> list[list[int]]:
    return [list(some) for some in bundles(sizes, places, MOST)]


def test_small_neighbours_on_one_node_go_together() -> None:
    assert made([10, 20, 30], "aaa") == [[0, 1, 2]]


def test_pieces_for_different_nodes_stay_apart() -> None:
    assert made([10, 20, 30, 40], "aabb") == [[0, 1], [2, 3]]


def test_a_full_bundle_is_followed_by_the_next() -> None:
    assert made([60, 40, 1], "aaa") == [[0, 1], [2]]


def test_a_piece_over_the_limit_is_alone() -> None:
    assert made([10, 500, 10], "aaa") == [[0], [1], [2]]


def test_no_pieces_make_no_bundle() -> None:
    assert made([], "") == []


@given(st.lists(st.tuples(st.integers(0, 150), st.sampled_from("ab"))))
def test_every_piece_is_in_one_bundle_of_its_node_and_within_the_limit(pieces: list[tuple[int, str]]) -> None:
    found = made([size for size, _ in pieces], "".join(place for _, place in pieces))
    assert [index for some in found for index in some] == list(range(len(pieces)))
    for some in found:
        assert len({pieces[index][1] for index in some}) == 1
        assert len(some) == 1 or sum(pieces[index][0] for index in some) <= MOST
