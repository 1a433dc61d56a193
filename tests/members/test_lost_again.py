"""While a policy replaces a lost rank, another rank is lost, or a new rank cannot be started."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.calls.health_check import look_after
from phalanx.members import snapshots
from phalanx.testing import faults
from phalanx.testing.scripted import Event, scripted
from phalanx.worker import handlers
from tests.members.ledger import Ledger


@pytest.fixture
def four() -> Iterator[px.ResourcePool]:
    with scripted(lambda what, number: "fine"), px.ResourcePool([4], use_gpu=False, backend="inline") as pool:
        yield pool


@pytest.fixture
def group(four: px.ResourcePool) -> px.WorkerGroup:
    """Four ranks with one call in their states and in a snapshot."""
    made = px.WorkerGroup(four, Ledger, on_failure=px.ReplacePolicy())
    made.add(1)
    px.snapshot(made)
    return made


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Functions to run once, after ranks copied their states and before holders get the copies."""
    todo: list[Callable[[], None]] = []
    run_on = snapshots.run_on

    def sent(group: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if function is handlers.hold_copies and todo:
            todo.pop()()
        return run_on(group, function, *args, **options)

    monkeypatch.setattr(snapshots, "run_on", sent)
    return todo


def lose(group: px.WorkerGroup, rank: int) -> None:
    """Kill a rank, and have the monitor notice."""
    faults.kill(group, rank)
    look_after(group.core)


@pytest.mark.parametrize("seen", [True, False])
def test_a_rank_lost_during_a_replacement_is_replaced_with_the_state_of_the_snapshot(
    group: px.WorkerGroup, meanwhile: list[Callable[[], None]], seen: bool
) -> None:
    lose(group, 1)
    meanwhile.append(lambda: lose(group, 3) if seen else faults.kill(group, 3))

    assert group.add(2) == [[1, 2]] * 4
    assert group.epoch == 2


def test_a_policy_leaves_a_group_broken_after_max_failures(four: px.ResourcePool) -> None:
    group = px.WorkerGroup(four, Ledger, on_failure=px.ReplacePolicy(max_failures=1))
    px.snapshot(group)
    lose(group, 1)
    assert group.add(1) == [[1]] * 4
    lose(group, 2)
    with pytest.raises(px.GroupBroken, match="does not allow another replacement now: 1 were made"):
        group.add(2)


def test_a_group_restarts_if_a_rank_and_the_holder_of_its_copy_are_lost(
    group: px.WorkerGroup, meanwhile: list[Callable[[], None]]
) -> None:
    holders = px.snapshot(group).holders
    lose(group, 1)
    meanwhile.append(lambda: lose(group, holders.index(1)))

    assert group.add(2) == [[2]] * 4
    assert group.state == "ready"


def test_a_snapshot_that_loses_a_rank_fails_and_the_previous_snapshot_stays_valid(
    group: px.WorkerGroup, meanwhile: list[Callable[[], None]]
) -> None:
    group.add(2)
    meanwhile.append(lambda: lose(group, 3))

    with pytest.raises(px.GroupBroken):
        px.snapshot(group)

    assert (group.state, group.epoch) == ("broken", 0)
    assert group.add(3) == [[1, 3]] * 4
    lose(group, 0)
    assert group.add(4) == [[1, 4]] * 4  # all ranks are at the first snapshot


@pytest.mark.parametrize("refused", ["reserve", "spawn"])
def test_a_group_that_cannot_start_a_new_rank_restarts_with_a_warning(
    refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    full: list[str] = []

    def script(what: str, number: int) -> Event:
        if what in full:
            full.remove(what)
            return "refuse"
        return "fine"

    with scripted(script), px.ResourcePool([3], use_gpu=False, backend="inline") as pool:
        group = px.WorkerGroup(pool, Ledger, on_failure=px.ReplacePolicy())
        group.add(1)
        px.snapshot(group)
        before = group.core.endpoints
        lose(group, 1)
        full.append(refused)

        with caplog.at_level(logging.WARNING, "phalanx"):
            assert group.add(2) == [[2]] * 3  # the state of the constructor, not of the snapshot

        assert group.state == "ready"
        assert not {id(one) for one in before} & {id(one) for one in group.core.endpoints}
    assert any("is restarted instead" in one.getMessage() for one in caplog.records)
