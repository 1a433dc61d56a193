"""Clocks of other hosts, found from what goes back and forth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.tracing.clocks import Bounds, bounds_of, corrected, corrected_span, estimate
from phalanx.tracing.events import Part, Span


@given(
    st.integers(-(10**12), 10**12),
    st.lists(
        st.tuples(st.integers(1, 10**6), st.integers(0, 10**7), st.integers(1, 10**6)), min_size=1, max_size=9
    ),
)
def test_the_true_offset_lies_within_the_uncertainty(offset: int, trips: list[tuple[int, int, int]]) -> None:
    parts = []
    now = 10**15
    for there, work, back in trips:
        received, returned = now + there + offset, now + there + work + offset
        parts.append(
            Part(0, encoded=now, received=received, returned=returned, fetched=returned - offset + back)
        )
        now += there + work + back
    clock = estimate("b", map(bounds_of, parts))

    assert clock is not None
    assert abs(clock.offset - offset) <= clock.uncertainty
    assert clock.uncertainty <= min(there + back for there, _, back in trips) // 2 + 1 + max(
        max(there for there, _, _ in trips), max(back for _, _, back in trips)
    )


def test_without_an_answer_nothing_is_known_of_a_clock() -> None:
    assert estimate("b", [Bounds(None, 5)]) is None


def test_a_clock_that_was_set_meanwhile_has_an_uncertainty_that_says_so() -> None:
    clock = estimate("b", [Bounds(90, 110), Bounds(1090, 1110)])

    assert clock is not None
    assert (clock.offset, clock.uncertainty) == (600, 491)


def test_correcting_moves_the_ranks_times_and_leaves_the_drivers() -> None:
    part = Part(0, encoded=1, sent=2, received=103, started=104, finished=None, returned=106, fetched=7)

    assert corrected(part, 100) == replace(part, received=3, started=4, returned=6)
    assert corrected_span(Span("x", 103, None), 100) == Span("x", 3, None)


@pytest.mark.parametrize("missing", ["encoded", "received"])
def test_a_part_with_a_time_missing_bounds_one_side_only(missing: str) -> None:
    part = replace(Part(0, encoded=1, received=5, returned=8, fetched=9), **{missing: None})

    assert bounds_of(part) == Bounds(-1, None)
