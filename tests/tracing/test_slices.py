"""What is drawn of a trace: slices that nest, on lanes that never overlap."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.tracing.events import Part, Span, Trace, TracedCall
from phalanx.tracing.slices import Slice, driver_slices, place, rank_slices
from tests.tracing.made_up import FAIL, GENERATE, MS, TRACE, at, key, part


def named(slices: list[Slice]) -> list[tuple[str, float, float]]:
    return [(one.name, (one.start - at(0)) / MS, (one.end - at(0)) / MS) for one in slices]


def test_a_rank_shows_its_share_of_each_call_with_the_phases_and_spans_in_it() -> None:
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
        ("join", 30, 31),
    ]


def test_calls_that_overlap_on_the_driver_lie_on_lanes_of_their_own() -> None:
    lanes = {one.call: one.lane for one in driver_slices(TRACE)["policy"] if one.kind == "call"}

    assert lanes == {1: 0, 2: 1, 3: 0}


def test_a_failed_share_has_its_error_and_one_without_an_end_is_open_to_the_end_of_the_trace() -> None:
    failed, last = rank_slices(TRACE)[key(0)][-2], rank_slices(TRACE)[key(1)][-2]

    assert (failed.name, failed.open, failed.error) == ("fail", False, "ValueError: no")
    assert (last.name, last.open, last.end) == ("fail", True, TRACE.ended)


def test_a_call_that_nobody_asked_for_ends_when_its_ranks_were_through() -> None:
    never = replace(GENERATE, asked=None, joined=None, ended=None)
    never = replace(never, parts=tuple(replace(one, fetched=None) for one in never.parts))
    whole = driver_slices(replace(TRACE, calls=(never,)))["policy"][0]

    assert (whole.end, whole.open) == (at(28), False)


def test_a_call_that_was_never_taken_up_leaves_no_mark_on_its_rank() -> None:
    queued = replace(FAIL, parts=(Part(0, at(70)), Part(1, at(70))))

    assert rank_slices(replace(TRACE, calls=(queued,), spans=()))[key(0)] == []


def test_waiting_for_a_result_by_reference_is_a_phase_of_its_own() -> None:
    source = TracedCall(1, "a", 0, "", "make", at(0), parts=(part(0, 0, 0, 0, 0, 50, 50),))
    user = TracedCall(2, "b", 0, "", "use", at(0), sources=(1,), parts=(part(0, 0, 0, 10, 60, 80, 80),))
    found = rank_slices(Trace(at(0), at(100), calls=(source, user)))[key(0, "b")]

    assert named(found) == [("use", 10, 80), ("await results", 10, 50), ("arguments", 50, 60)]


def test_a_span_outside_of_calls_lies_on_its_ranks_track() -> None:
    background = Span("prefetch", at(50), at(60), key(0), None)

    assert "prefetch" in [one.name for one in rank_slices(replace(TRACE, spans=(background,)))[key(0)]]


stretch = st.tuples(st.integers(0, 200), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(st.tuples(stretch, st.lists(stretch, max_size=4)), max_size=25))
def test_slices_of_one_lane_nest_or_lie_apart(
    families: list[tuple[tuple[int, int], list[tuple[int, int]]]],
) -> None:
    made = []
    for outer, inner in families:
        clipped = [(max(a, outer[0]), min(max(b, outer[0]), outer[1])) for a, b in inner]
        made.append([_slice(outer), *(_slice(one) for one in clipped if one[0] <= one[1])])
    placed = place(made)

    assert len(placed) == sum(map(len, made))
    for one in placed:
        for other in placed:
            if one is not other and one.lane == other.lane:
                apart = one.end <= other.start or other.end <= one.start
                nested = (one.start <= other.start and other.end <= one.end) or (
                    other.start <= one.start and one.end <= other.end
                )
                assert apart or nested
                assert apart or one.depth != other.depth or one.start == one.end or other.start == other.end


def _slice(times: tuple[int, int]) -> Slice:
    return Slice("x", times[0], times[1], "call")
