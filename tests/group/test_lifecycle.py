"""The life of a group: what may happen when, and that nothing else can."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from phalanx.errors import (
    DispatchError,
    GroupBroken,
    GroupClosed,
    InternalError,
    PhalanxError,
    WorkerDiedError,
)
from phalanx.group.lifecycle import TRANSITIONS, Event, Lifecycle, State

FIRST = WorkerDiedError("group 'actor': rank 2 died: signal SIGKILL\n\nmore", group="actor", method="update")
SECOND = WorkerDiedError("rank 0 died", group="actor", method="update")

TO_STATE: dict[State, list[Happened]] = {
    State.STARTING: [],
    State.READY: [(Event.STARTED, 0)],
    State.BROKEN: [(Event.STARTED, 0), (Event.BREAK, 0, FIRST)],
    State.RESTARTING: [(Event.STARTED, 0), (Event.BREAK, 0, FIRST), (Event.RESTART,)],
    State.CLOSING: [(Event.STARTED, 0), (Event.CLOSE,)],
    State.CLOSED: [(Event.STARTED, 0), (Event.CLOSE,), (Event.CLOSED,)],
}
KINDS = (Event.STARTED, Event.BREAK, Event.RESTART, Event.CLOSE, Event.CLOSED)

Happened = tuple[Any, ...]
"""Arguments of `Lifecycle.handle`."""


def living(*happened: Happened) -> Lifecycle:
    lifecycle = Lifecycle("actor")
    for event in happened:
        lifecycle.handle(*event)
    return lifecycle


def event_of(kind: Event, epoch: int) -> Happened:
    if kind is Event.BREAK:
        return kind, epoch, SECOND
    return (kind, epoch) if kind is Event.STARTED else (kind,)


def snapshot(lifecycle: Lifecycle) -> tuple[object, ...]:
    return lifecycle.state, lifecycle.epoch, lifecycle.cause


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(State, KINDS)))
def test_a_transition_is_in_the_table_or_refused_without_any_change(state: State, kind: Event) -> None:
    lifecycle = living(*TO_STATE[state])
    before = snapshot(lifecycle)
    event = event_of(kind, lifecycle.epoch)

    if (state, kind) in TRANSITIONS:
        lifecycle.handle(*event)
        assert lifecycle.state is TRANSITIONS[state, kind]
    else:
        with pytest.raises(InternalError, match=f"{state.value} in epoch .* was told {kind.value}"):
            lifecycle.handle(*event)
        assert snapshot(lifecycle) == before


def test_a_broken_group_keeps_the_first_cause_until_a_restart_fails() -> None:
    broken = living(*TO_STATE[State.BROKEN], (Event.BREAK, 0, SECOND))
    again = living(*TO_STATE[State.RESTARTING], (Event.BREAK, 1, SECOND))

    assert broken.cause is FIRST
    assert (again.state, again.cause) == (State.BROKEN, SECOND)


def test_a_late_failure_of_an_old_epoch_does_nothing_and_one_of_an_epoch_to_come_is_refused() -> None:
    lifecycle = living(*TO_STATE[State.RESTARTING], (Event.STARTED, 1))

    lifecycle.handle(Event.BREAK, 0, SECOND)

    assert (lifecycle.state, lifecycle.cause) == (State.READY, None)
    with pytest.raises(InternalError, match="epoch 3"):
        living().handle(Event.STARTED, 3)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (State.STARTING, DispatchError, "still starting"),
        (State.BROKEN, GroupBroken, r"was: group 'actor': rank 2 died: signal SIGKILL$"),
        (State.RESTARTING, GroupBroken, r"being restarted .* after: group 'actor': rank 2 died"),
        (State.CLOSING, GroupClosed, "group 'actor' is closing"),
        (State.CLOSED, GroupClosed, "group 'actor' is closed"),
    ],
)
def test_a_group_takes_calls_only_when_it_is_ready(
    state: State, error: type[PhalanxError], words: str
) -> None:
    living(*TO_STATE[State.READY]).check_callable()
    with pytest.raises(error, match=words) as caught:
        living(*TO_STATE[state]).check_callable()

    if isinstance(caught.value, GroupBroken):
        assert caught.value.cause is caught.value.__cause__ is FIRST
