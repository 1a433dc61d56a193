"""The lifecycle of a group: allowed events, and refusals of other events."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx as px
from phalanx.group.lifecycle import Event, Lifecycle, State

FIRST = px.WorkerDiedError(
    "group 'actor': rank 2 died: signal SIGKILL\n\nmore", group="actor", method="update"
)
SECOND = px.WorkerDiedError("rank 0 died", group="actor", method="update")

TO_STATE: dict[State, list[Happened]] = {
    State.STARTING: [],
    State.READY: [(Event.STARTED, 0)],
    State.BROKEN: [(Event.STARTED, 0), (Event.BREAK, 0, FIRST)],
    State.RESTARTING: [(Event.STARTED, 0), (Event.BREAK, 0, FIRST), (Event.RESTART,)],
    State.CLOSING: [(Event.STARTED, 0), (Event.CLOSE,)],
    State.CLOSED: [(Event.STARTED, 0), (Event.CLOSE,), (Event.CLOSED,)],
}

Happened = tuple[Any, ...]
"""Arguments of `Lifecycle.handle`."""


def living(*happened: Happened) -> Lifecycle:
    lifecycle = Lifecycle("actor")
    for event in happened:
        lifecycle.handle(*event)
    return lifecycle


def test_an_event_that_the_table_lacks_is_refused_without_any_change() -> None:
    closed = living(*TO_STATE[State.CLOSED])

    with pytest.raises(px.errors.InternalError, match="closed in epoch 0, got the event restart"):
        closed.handle(Event.RESTART)

    assert (closed.state, closed.epoch, closed.cause) == (State.CLOSED, 0, None)


def test_a_failed_start_breaks_a_group_a_view_follows_its_owner_and_a_closed_group_stays_closed() -> None:
    assert living((Event.BREAK, 0, FIRST)).state is State.BROKEN
    assert living(*TO_STATE[State.BROKEN], (Event.FOLLOW, 1)).state is State.READY
    for state in (State.CLOSING, State.CLOSED):
        assert living(*TO_STATE[state], (Event.STARTED, 0), (Event.BREAK, 0, SECOND)).state is state


def test_a_broken_group_keeps_the_first_cause_until_a_restart_fails() -> None:
    broken = living(*TO_STATE[State.BROKEN], (Event.BREAK, 0, SECOND))
    again = living(*TO_STATE[State.RESTARTING], (Event.BREAK, 1, SECOND))

    assert broken.cause is FIRST
    assert (again.state, again.cause) == (State.BROKEN, SECOND)


def test_a_failure_of_an_old_epoch_is_ignored_and_an_event_of_a_future_epoch_is_refused() -> None:
    lifecycle = living(*TO_STATE[State.RESTARTING], (Event.STARTED, 1))

    lifecycle.handle(Event.BREAK, 0, SECOND)

    assert (lifecycle.state, lifecycle.cause) == (State.READY, None)
    with pytest.raises(px.errors.InternalError, match="epoch 3"):
        living().handle(Event.STARTED, 3)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (State.STARTING, px.DispatchError, "still starting"),
        (State.BROKEN, px.GroupBroken, r"was: group 'actor': rank 2 died: signal SIGKILL$"),
        (State.RESTARTING, px.GroupBroken, r"being restarted .* after: group 'actor': rank 2 died"),
        (State.CLOSING, px.GroupClosed, "group 'actor' is closing"),
        (State.CLOSED, px.GroupClosed, "group 'actor' is closed"),
    ],
)
def test_a_group_accepts_calls_only_if_it_is_ready(
    state: State, error: type[px.PhalanxError], words: str
) -> None:
    living(*TO_STATE[State.READY]).check_callable()
    with pytest.raises(error, match=words) as caught:
        living(*TO_STATE[state]).check_callable()

    if isinstance(caught.value, px.GroupBroken):
        assert caught.value.cause is caught.value.__cause__ is FIRST


@pytest.mark.parametrize("policy", [px.RestartPolicy(window_s=100.0), px.ReplacePolicy(window_s=100.0)])
def test_a_policy_counts_the_recoveries_within_its_window(
    policy: px.RestartPolicy | px.ReplacePolicy,
) -> None:
    assert policy.recent([0.0, 50.0, 51.0, 150.0], now=150.0) == [51.0, 150.0]
