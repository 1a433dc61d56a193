"""A complete run is saved as one commit and resumes from it, on each backend."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.checkpoint.save_future import SaveFuture
from phalanx.checkpoint.steps import StepWriter
from tests.checkpoint.save_workers import Bag, Rows
from tests.support.fault_workers import lose

SOAK_ON_RAY = True
WITHIN = 30.0


class Item:
    """An item of a channel."""


class Model(Bag):
    def __init__(self) -> None:
        super().__init__(weight=torch.zeros(4), seen=0)

    @px.register
    def add(self, amount: float) -> None:
        self.held = {"weight": self.held["weight"] + amount, "seen": self.held["seen"] + 1}

    @px.register
    def look(self) -> list[float]:
        return [*self.held["weight"].tolist(), self.held["seen"]]

    @px.register
    def generate(self, staleness: px.StalenessManager, channel: px.Channel, rows: int) -> int:
        with staleness.lease(rows, WITHIN) as lease:
            return lease.put(channel, {"x": torch.full((rows, 1), float(self.held["seen"]))}, lease.version)


@pytest.fixture
def group(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool[0:2], Model, name="model", on_failure=px.RestartPolicy()) as made:
        yield made


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def test_resume_restores_the_state_and_the_random_numbers_of_the_driver(path: str, backend: str) -> None:
    def state_of(seed: int) -> dict[str, Any]:
        return {
            "rewards": [seed / 2],
            "generator": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "torch": torch.Generator().manual_seed(seed),
        }

    def drawn(state: dict[str, Any]) -> list[float]:
        own = [random.random(), float(np.random.rand()), torch.rand(1).item()]
        given = [state["generator"].random(), state["numpy"].random()]
        return [*own, *given, *torch.rand(3, generator=state["torch"]).tolist()]

    state, later = state_of(1), state_of(2)
    with px.checkpoint.CheckpointManager(path, state=state) as run:
        run.save(1)
        expected = drawn(state)
    with px.checkpoint.CheckpointManager(path, state=later) as run:
        run.resume()

    assert later["rewards"] == [0.5]
    assert drawn(later) == expected


def test_a_run_starts_without_a_save_and_resumes_from_a_step_that_it_keeps_after_a_loss(
    group: px.WorkerGroup, path: str
) -> None:
    with px.checkpoint.CheckpointManager(path, {"model": group}, keep=2) as run:
        assert (run.resume(), run.steps()) == (None, [])
        for step in (1, 2):
            group.add(1.0)
            run.save(step)
        run.save.submit(3)  # closing waits for it
    assert run.steps() == [2, 3]

    with px.checkpoint.CheckpointManager(path, {"model": group}) as run:
        lose(group, 1, call=group.look)
        with pytest.raises(px.GroupBroken):  # the policy must not restart it for a save
            run.save(4)
        assert (run.resume(2), run.steps()) == (2, [2, 3])
        assert group[0].look() == [2.0, 2.0, 2.0, 2.0, 2]


@contextmanager
def begun(
    path: str, state: Any = None, **groups: px.WorkerGroup
) -> Iterator[tuple[px.Channel, px.StalenessManager, px.checkpoint.CheckpointManager]]:
    """A run with a channel and a staleness of its own."""
    staleness = px.StalenessManager(max_lag=2, rows_per_version=4)
    with (
        px.Channel(name="rollouts") as channel,
        px.checkpoint.CheckpointManager(
            path, groups, state=state, channels=[channel], staleness=staleness
        ) as run,
    ):
        yield channel, staleness, run


@pytest.mark.slow_on_cluster
def test_resume_restores_channels_and_staleness(group: px.WorkerGroup, path: str) -> None:
    with begun(path, model=group) as (channel, staleness, run):
        assert group.generate(staleness, channel, 4) == [4, 4]
        with channel.take_rows(4, WITHIN):
            pass
        staleness.advance(1)
        run.save(1)
        before = staleness.stats.rows
    with begun(path, model=group) as (channel, staleness, run):
        run.resume()

        assert (channel.rows.waiting, channel.rows.delivered) == (4, 4)
        assert staleness.version == 1
        assert staleness.stats.rows == before
        with channel.take_rows(4, WITHIN) as batch:
            assert batch.rows == 4
        staleness.advance(2)
        assert staleness.stats.rows.trained == 8


@pytest.mark.slow_on_cluster
def test_a_take_that_waits_during_resume_gets_restored_items(path: str, backend: str) -> None:
    if backend == "inline":
        pytest.skip("nothing waits where nothing else runs")
    with begun(path) as (channel, _, run):
        channel.put([1, 2])
        run.save(1)
    with begun(path) as (channel, _, run):
        got: list[Any] = []
        taker = threading.Thread(target=lambda: got.append(channel.take_rows(2, WITHIN).value()))
        taker.start()
        run.resume()
        taker.join(WITHIN)

        assert got == [[1, 2]]


def test_a_used_channel_is_refused_before_anything_is_loaded(group: px.WorkerGroup, path: str) -> None:
    with begun(path, model=group) as (channel, _, run):
        run.save(1)
        group.add(1.0)
        channel.put([1])

        with pytest.raises(px.DeclarationError, match="used already"):
            run.resume()
        assert group[0].look() == [1.0, 1.0, 1.0, 1.0, 1]


def test_a_channel_item_that_cannot_be_read_is_refused_before_anything_is_loaded(
    group: px.WorkerGroup, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"step": 1}
    with begun(path, state, model=group) as (channel, _, run):
        channel.put(Item())
        run.save(1)
    group.add(1.0)
    state["step"] = 2
    monkeypatch.delattr(sys.modules[__name__], "Item")  # as in a process without its module
    with (
        begun(path, state, model=group) as (_, _, run),
        pytest.raises(px.checkpoint.CheckpointError, match="Item"),
    ):
        run.resume()
    assert (group[0].look(), state) == ([1.0, 1.0, 1.0, 1.0, 1], {"step": 2})


def test_resume_never_decreases_versions_of_weights(group: px.WorkerGroup, path: str) -> None:
    numbers = group.core.published_weights
    with px.checkpoint.CheckpointManager(path, {"model": group}) as run:
        numbers["", "policy"] = 7
        run.save(1)
        numbers.clear()
        run.resume()
        assert numbers == {("", "policy"): 7}
        numbers["", "policy"] = 9
        run.resume()
        assert numbers == {("", "policy"): 9}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"groups": {}}, "saved with groups model and has none"),
        ({"state": {"other": 1}}, "saved with state progress and has other"),
        ({"channels": []}, "saved with channels rollouts and has none"),
        ({"staleness": True}, "saved with no staleness"),
    ],
)
def test_a_step_of_a_run_with_other_parts_is_refused(
    group: px.WorkerGroup, path: str, changed: dict[str, Any], why: str
) -> None:
    with px.Channel(name="rollouts") as channel:
        given: dict[str, Any] = {"groups": {"model": group}, "state": {"progress": 1}, "channels": [channel]}
        with px.checkpoint.CheckpointManager(path, **given) as run:
            run.save(1)
        given |= changed
        if "staleness" in changed:
            given["staleness"] = px.StalenessManager(1, 1)
        with (
            px.checkpoint.CheckpointManager(path, **given) as run,
            pytest.raises(px.checkpoint.CheckpointMismatch, match=why),
        ):
            run.resume()


def test_a_step_that_no_run_saved_and_a_damaged_state_file_are_refused(
    group: px.WorkerGroup, path: str
) -> None:
    StepWriter(path, 1).commit()
    with px.checkpoint.CheckpointManager(path, {"model": group}, state={"progress": 1}) as run:
        with pytest.raises(px.checkpoint.CheckpointMismatch, match="not saved by a px"):
            run.resume()
        file = Path(run.save(2).path("driver/state.pickle"))
        file.write_bytes(bytes(len(file.read_bytes())))
        with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"driver/state\.pickle"):
            run.resume()


def test_state_that_cannot_be_saved_is_named_and_a_closed_run_saves_nothing(path: str, backend: str) -> None:
    with px.checkpoint.CheckpointManager(path, state={"lock": threading.Lock()}) as run:
        with pytest.raises(px.checkpoint.CheckpointError, match="the driver's 'lock' of the state"):
            run.save(1)
        assert run.steps() == []

    with pytest.raises(px.DeclarationError, match="closed"):
        run.save(1)
    with pytest.raises(px.DeclarationError, match="state_dict"):
        px.checkpoint.CheckpointManager(path, state=3)


def test_no_group_is_loaded_unless_all_groups_fit(pool: px.ResourcePool, path: str) -> None:
    first, second = px.WorkerGroup(pool[0:2], Model, name="first"), px.WorkerGroup(pool[0:1], Model)
    with px.checkpoint.CheckpointManager(path, {"first": first, "second": second}) as run:
        run.save(1)
        first.add(1.0)
    other = px.WorkerGroup(pool[0:1], Rows)
    with (
        px.checkpoint.CheckpointManager(path, {"first": first, "second": other}) as run,
        pytest.raises(px.checkpoint.CheckpointMismatch),
    ):
        run.resume()

    assert first.look() == [[1.0, 1.0, 1.0, 1.0, 1]] * 2


def test_a_run_stays_at_its_path_if_the_working_directory_changes(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with px.checkpoint.CheckpointManager("run") as run:
        monkeypatch.chdir(tmp_path / "other")

        assert run.save(1).folder == str(tmp_path / "run" / "step-00000001")
        assert run.steps() == [1]


def test_an_error_of_the_block_replaces_the_error_of_the_pending_save(
    group: px.WorkerGroup, path: str
) -> None:
    fail = Mock(side_effect=px.GroupClosed("closed before step 1 was written", group="model"))
    with pytest.raises(KeyError), px.checkpoint.CheckpointManager(path, {"model": group}) as run:
        run._pending = SaveFuture(fail, "save of step 1", threading.Event())
        raise KeyError
