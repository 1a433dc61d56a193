"""The slices of a trace: they nest, on lanes without overlaps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from phalanx.tracing.events import RankSpan, Span, Trace, TracedCall
from phalanx.tracing.slices import Slice, driver_slices, place, rank_slices
from tests.tracing.made_up import FAIL, GENERATE, MS, TRACE, at, key, part


def named(slices: list[Slice]) -> list[tuple[str, float, float]]:
    return [(one.name, (one.start - at(0)) / MS, (one.end - at(0)) / MS) for one in slices]


def test_a_rank_has_a_slice_for_each_call_with_its_phases_and_spans() -> None:
    found = rank_slices(TRACE)[key(0)]

    assert named(found)[:7] == [
        ("actor.generate", 3, 16),
        ("arguments", 3, 5),
        ("return", 15, 16),
        ("actor.update", 17, 42),
        ("arguments", 17, 20),
        ("backward", 22, 35),
        ("return", 40, 42),
    ]


def test_the_driver_shows_plan_send_wait_fetch_and_join_of_a_call() -> None:
    found = [one for one in driver_slices(TRACE)["policy"] if one.call == 1]

    assert named(found) == [
        ("actor.generate", 0, 32),
        ("plan", 0, 1),
        ("send", 1, 3),
        ("in the background", 3, 4),
        ("wait", 4, 28),
        ("fetch", 28, 30),
        ("join or read", 30, 32),
    ]


def test_overlapping_calls_have_separate_lanes_and_unread_calls_end_with_their_ranks() -> None:
    lanes = {one.call: one.lane for one in driver_slices(TRACE)["policy"] if one.kind == "call"}
    never_asked = replace(GENERATE, asked=None, ended=None)
    never_asked = replace(never_asked, parts=tuple(replace(one, fetched=None) for one in GENERATE.parts))
    whole = driver_slices(replace(TRACE, calls=(never_asked,)))["policy"][0]

    assert lanes == {1: 0, 2: 1, 3: 0}
    assert (whole.end, whole.open) == (at(28), False)


def test_a_failed_slice_has_its_error_an_unfinished_slice_is_open_and_a_queued_call_has_none() -> None:
    failed, last = rank_slices(TRACE)[key(0)][-2], rank_slices(TRACE)[key(1)][-2]
    queued = replace(FAIL, parts=(RankSpan(0), RankSpan(1)))
    background = Span("prefetch", at(50), at(60), key(0), None)
    outside = rank_slices(replace(TRACE, calls=(queued,), spans=(background,)))[key(0)]

    assert (failed.name, failed.open, failed.error) == ("fail", False, "ValueError: no")
    assert (last.name, last.open, last.end) == ("fail", True, TRACE.ended)
    assert [one.name for one in outside] == ["prefetch"]


def test_waiting_for_a_result_by_reference_is_a_separate_phase() -> None:
    source = TracedCall(1, "a", 0, "", "make", at(0), parts=(part(0, 0, 0, 50, 50),))
    user = TracedCall(2, "b", 0, "", "use", at(0), sources=(1,), parts=(part(0, 10, 60, 80, 80),))
    found = rank_slices(Trace(at(0), at(100), calls=(source, user)))[key(0, "b")]

    assert named(found) == [("use", 10, 80), ("await results", 10, 50), ("arguments", 50, 60)]


stretch = st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(stretch, st.lists(stretch, max_size=4)), max_size=25))
def test_slices_of_one_lane_nest_or_do_not_overlap(families: list[tuple[Any, list[Any]]]) -> None:
    made = []
    for (begin, end), inner in families:
        clipped = [(max(a, begin), min(max(b, begin), end)) for a, b in inner]
        times = [(begin, end), *(one for one in clipped if one[0] <= one[1])]
        made.append([Slice("x", *one, "call") for one in times])
    placed = place(made)

    assert len(placed) == sum(map(len, made))
    for one, other in itertools.permutations(placed, 2):
        if one.lane == other.lane and one.start < other.end and other.start < one.end:
            inside = one.start <= other.start and other.end <= one.end
            assert inside or (other.start <= one.start and one.end <= other.end)
            assert one.depth != other.depth or one.start == one.end or other.start == other.end
