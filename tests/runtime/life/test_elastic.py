"""How many ranks a group should have: decisions over simulated days."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px
from phalanx.runtime.life.elastic import Elastic, Load, Wish

DAY_S = 24 * 3600
LOOK_S = 1800


def a_day(elastic: Elastic, seed: int) -> list[tuple[Load, int]]:
    """Work comes by the hour, with bursts; each rank does 30 items between two looks. What was seen and decided."""
    choice = random.Random(seed)
    ranks, queued, wish, seen = elastic.min, 0, None, []
    for now in range(0, DAY_S, LOOK_S):
        busy_hour = 8 <= now // 3600 < 20
        queued += choice.randrange(0, 360 if busy_hour else 60) + (500 if choice.random() < 0.01 else 0)
        done = min(queued, 90 * ranks)
        queued -= done
        load = Load(queued, min(done, ranks), ranks, float(now))
        size, wish = elastic.next_size(load, wish)
        seen.append((load, size))
        ranks = size
    return seen


@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    low=st.integers(1, 4),
    more=st.integers(0, 8),
    per_rank=st.integers(1, 60),
    after=st.sampled_from([0.0, 1800.0, 7200.0]),
)
def test_a_thousand_days(seed: int, low: int, more: int, per_rank: int, after: float) -> None:
    elastic = Elastic(low, low + more, per_rank, shrink_after_s=after)
    day = a_day(elastic, seed)

    fewer_since: float | None = None
    for load, size in day:
        wanted = elastic.wanted(load)
        assert low <= size <= low + more
        assert size >= min(wanted, low + more)  # never fewer than were decided for now
        if wanted >= load.ranks:
            fewer_since = None
            assert size == wanted
        else:
            fewer_since = load.now if fewer_since is None else fewer_since
            shrinks = size < load.ranks
            assert shrinks == (load.now - fewer_since >= after and size != load.ranks)
            if shrinks or load.now - fewer_since >= after:
                fewer_since = None


def test_a_group_grows_at_once_and_shrinks_only_after_a_while() -> None:
    elastic = px.Elastic(1, 8, decide=2, shrink_after_s=60)

    assert elastic.next_size(Load(7, 0, 1, 0.0), None) == (4, None)
    assert elastic.next_size(Load(0, 0, 4, 10.0), None) == (4, Wish(1, 10.0))
    assert elastic.next_size(Load(4, 0, 4, 20.0), Wish(1, 10.0)) == (4, Wish(2, 10.0))
    assert elastic.next_size(Load(0, 0, 4, 70.0), Wish(2, 10.0)) == (2, None)


def test_a_moment_of_much_work_forgets_the_wish_for_fewer() -> None:
    elastic = px.Elastic(1, 8, decide=2, shrink_after_s=60)

    assert elastic.next_size(Load(8, 0, 4, 50.0), Wish(1, 0.0)) == (4, None)


def test_the_decision_may_be_a_function_and_is_kept_within_the_bounds() -> None:
    elastic = px.Elastic(2, 3, lambda load: load.queued)

    assert [elastic.wanted(Load(queued, 0, 2)) for queued in (0, 3, 9)] == [2, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0, 2, 1), "min"), ((3, 2, 1), "less than min"), ((1, 2, 0), "decide"), ((1, 2, 1, -1.0), "shrink")],
)
def test_bounds_that_make_no_sense_are_refused(arguments: tuple[int, ...], said: str) -> None:
    with pytest.raises(px.DeclarationError, match=said):
        px.Elastic(*arguments)


def test_a_decision_that_is_no_number_is_refused() -> None:
    with pytest.raises(px.DeclarationError, match="whole number of ranks"):
        px.Elastic(1, 2, lambda load: 1.5).wanted(Load(0, 0, 1))  # type: ignore[arg-type, return-value]
