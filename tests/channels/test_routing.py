"""Sticky routing: a key stays where its cache is, until that rank is much busier or gone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.api.routing import Route, StickyRouting
from phalanx.errors import DeclarationError

loads = st.dictionaries(st.integers(0, 5), st.integers(0, 9), min_size=1)


def test_a_new_key_goes_to_the_least_busy_rank() -> None:
    assert StickyRouting(margin=2).route("a", {0: 3, 1: 1, 2: 2}) == Route(1, "new")


def test_new_keys_spread_over_idle_ranks() -> None:
    routing = StickyRouting(margin=2)

    ranks = [routing.route(key, {0: 0, 1: 0, 2: 0}).rank for key in range(6)]

    assert ranks == [0, 1, 2, 0, 1, 2]


def test_a_key_stays_while_the_difference_is_within_the_margin() -> None:
    routing = StickyRouting(margin=2)
    routing.route("a", {0: 0, 1: 0})

    assert routing.route("a", {0: 2, 1: 0}) == Route(0, "kept", 0)


def test_a_key_moves_when_its_rank_is_busier_by_more_than_the_margin_and_stays_there() -> None:
    routing = StickyRouting(margin=2)
    routing.route("a", {0: 0, 1: 0})

    assert routing.route("a", {0: 3, 1: 0}) == Route(1, "moved", 0)
    assert routing.route("a", {0: 0, 1: 1}) == Route(1, "kept", 1)


def test_a_key_whose_rank_is_lost_is_pinned_anew() -> None:
    routing = StickyRouting(margin=5)
    routing.route("a", {0: 0, 1: 1})

    assert routing.route("a", {1: 1, 2: 2}) == Route(1, "lost", 0)
    assert routing.route("a", {0: 0, 1: 3}) == Route(1, "kept", 1)


def test_the_key_not_asked_for_longest_is_forgotten_first() -> None:
    routing = StickyRouting(margin=5, max_keys=2)
    for key in ("a", "b", "a", "c"):
        routing.route(key, {0: 0, 1: 0})

    assert routing.route("a", {0: 0, 1: 0}).why == "kept"
    assert routing.route("b", {0: 0, 1: 0}).why == "new"


def test_a_key_that_is_forgotten_is_new_again() -> None:
    routing = StickyRouting(margin=5)
    routing.route("a", {0: 0})

    routing.forget("a")

    assert routing.keys() == {}
    assert routing.route("a", {0: 0}).why == "new"


@given(st.lists(st.tuples(st.integers(0, 4), loads)), st.integers(0, 4))
def test_no_key_waits_on_a_rank_busier_than_the_margin_and_none_moves_within_it(
    calls: list[tuple[int, dict[int, int]]], margin: int
) -> None:
    routing = StickyRouting(margin)
    pins: dict[int, int] = {}

    for key, load in calls:
        route = routing.route(key, load)

        assert load[route.rank] - min(load.values()) <= margin
        if key in pins and pins[key] in load and load[pins[key]] - min(load.values()) <= margin:
            assert route.rank == pins[key]
        pins[key] = route.rank
        assert sum(routing.keys().values()) == len(pins)


def test_no_rank_at_all_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="no rank to route to"):
        StickyRouting(margin=1).route("a", {})


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(DeclarationError, match="margin of 0 or more"):
        StickyRouting(margin=-1)
