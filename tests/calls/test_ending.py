"""How a call ends, by what was seen of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.calls.call_outcome import CallObservation, CallOutcome, decide
from phalanx.errors import CallCancelled, CallTimeout, GroupClosed, RankReport, WorkerDiedError


def report(rank: int, kind: str = "raised", **more: object) -> RankReport:
    return RankReport(rank=rank, kind=kind, message="odd", **more)  # pyright: ignore[reportArgumentType]


def seen(why: str, *reports: RankReport, **more: object) -> CallObservation:
    return CallObservation(why, "actor", "update", reports, **more)  # pyright: ignore[reportArgumentType]


def test_an_exception_on_ranks_that_all_ended_has_no_consequences() -> None:
    ending = decide(seen("failed", report(1)))

    assert (ending.stop, ending.breaks, ending.closes) == ((), False, False)


def test_a_lost_rank_breaks_the_group() -> None:
    ending = decide(seen("failed", report(0, "died"), report(1)))

    assert isinstance(ending.error, WorkerDiedError)
    assert ending.breaks


def test_ranks_still_at_a_failed_call_are_stopped() -> None:
    ending = decide(seen("failed", report(0), report(1, "stopped", victim=True), pending=[1]))

    assert (ending.stop, ending.breaks) == ([1], True)


def test_ranks_that_their_owner_ended_close_the_group_here() -> None:
    ending = decide(seen("failed", report(0, "died"), by_owner=True))

    assert isinstance(ending.error, GroupClosed)
    assert (ending.closes, ending.breaks) == (True, False)


@pytest.mark.parametrize("why", ["impatient", "expired"])
def test_ranks_that_all_ended_while_somebody_looked_give_their_values(why: str) -> None:
    assert decide(seen(why)) == CallOutcome(over=False)


def test_patience_that_is_over_ends_the_wait_alone() -> None:
    ending = decide(seen("impatient", report(0, "timeout", state="running"), pending=[0], waited=3.0))

    assert isinstance(ending.error, CallTimeout)
    assert (ending.over, ending.stop, ending.breaks) == (False, (), False)


def test_a_deadline_that_is_over_stops_who_is_late_and_breaks_the_group() -> None:
    late = [report(0, "timeout", state="finished"), report(1, "timeout", state="running")]
    ending = decide(seen("expired", *late, pending=[1], waited=3.0))

    assert isinstance(ending.error, CallTimeout)
    assert (ending.over, ending.stop, ending.breaks) == (True, [1], True)


def test_a_cancel_that_came_after_every_rank_had_returned_cancels_nothing() -> None:
    assert decide(seen("cancelled", report(0, "cancelled", state="finished"))) == CallOutcome(over=False)


def test_a_cancel_to_which_all_ranks_yield_leaves_the_group_ready() -> None:
    ending = decide(seen("cancelled", report(0, "cancelled"), report(1, "cancelled", state="finished")))

    assert isinstance(ending.error, CallCancelled)
    assert not ending.breaks


def test_a_cancel_that_cut_ranks_off_their_peers_breaks_the_group() -> None:
    assert decide(seen("cancelled", report(0, "cancelled"), severed=True)).breaks


@given(
    why=st.sampled_from(["failed", "impatient", "expired", "cancelled"]),
    kinds=st.lists(
        st.sampled_from(["raised", "died", "timeout", "cancelled", "stopped"]), min_size=1, max_size=5
    ),
    late=st.integers(0, 5),
    by_owner=st.booleans(),
)
def test_whoever_is_stopped_was_late_and_the_group_is_then_broken_or_closed(
    why: str, kinds: list[str], late: int, by_owner: bool
) -> None:
    reports = [report(rank, kind) for rank, kind in enumerate(kinds)]
    pending = list(range(min(late, len(kinds))))

    ending = decide(seen(why, *reports, pending=pending, by_owner=by_owner))

    assert set(ending.stop) <= set(pending)
    assert not ending.stop or ending.breaks or ending.closes
    assert ending.over or not (ending.stop or ending.breaks or ending.closes)
