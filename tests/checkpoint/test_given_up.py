"""Saves that fail or are cancelled while ranks still write leave nothing; errors and progress of saves."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import phalanx as px
from phalanx.checkpoint import rank_checkpoint as writing
from phalanx.checkpoint.save_future import SaveFuture, finish_open_saves
from phalanx.checkpoint.steps import listed
from phalanx.display import progress
from tests.checkpoint.save_workers import Bag, Rows
from tests.support.fault_workers import within

WITHIN = 60.0


@pytest.fixture
def group(here: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(here[0:2], Rows)


@pytest.fixture
def on_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Return a function that sets a hook, which is called with the path of each file before a rank writes it."""
    real = writing.write_items

    def change(first: Callable[[str], None]) -> None:
        def write_items(folder: str, plan: Any, *args: Any) -> Any:
            first(f"{folder}/{plan.storage_data.prefix}0.distcp")
            return real(folder, plan, *args)

        monkeypatch.setattr(writing, "write_items", write_items)

    return change


def late(run: Path, fails: str = "") -> Callable[[str], None]:
    """Return a hook that delays files until the save has failed, and raises at once for the paths ``fails``."""

    def before(path: str) -> None:
        if fails and fails in path:
            raise OSError("no such luck")
        assert within(WITHIN, lambda: not list(run.rglob(writing.CONTINUE)))
        Path(path).write_bytes(b"late")

    return before


@pytest.mark.parametrize(("groups", "fails"), [(1, "__1_"), (2, "groups/0")])
def test_a_failed_submitted_save_leaves_no_files_of_slower_ranks(
    here: px.ResourcePool, tmp_path: Path, on_write: Any, groups: int, fails: str
) -> None:
    on_write(late(tmp_path, fails=fails))
    made = {str(number): px.WorkerGroup(here[0:2], Rows) for number in range(groups)}
    with px.checkpoint.CheckpointManager(tmp_path, made) as run:
        why = r"rank \d of .* could not write step 3: OSError: no such luck"
        with pytest.raises(px.checkpoint.CheckpointError, match=why):
            run.save.submit(3).result(WITHIN)

        assert listed(str(tmp_path)) == []


def test_a_cancelled_save_leaves_nothing_and_the_next_save_works(
    group: px.WorkerGroup, tmp_path: Path, on_write: Any
) -> None:
    on_write(late(tmp_path))
    future = px.save.submit(group, tmp_path, step=1)

    assert future.cancel()

    assert future.cancelled()
    with pytest.raises(px.CallCancelled, match="the save of step 1 was cancelled"):
        future.result(WITHIN)
    assert listed(str(tmp_path)) == []
    px.save(group, tmp_path, step=2)
    assert px.load(group, tmp_path).step == 2


def test_a_save_gives_way_to_calls_and_resizes_can_be_gathered_with_them_and_not_be_cancelled_afterwards(
    here: px.ResourcePool, tmp_path: Path, on_write: Any
) -> None:
    class Own(Bag):
        independent = True

    policies: list[int] = []
    on_write(lambda path: policies.append(os.sched_getscheduler(0)))
    group = px.WorkerGroup(here, Own.bind(x=1))
    px.resize(group, 2)
    future = px.save.submit(group, tmp_path, step=4)
    px.resize(group, 3)
    saved, held = px.gather(future, group.get.submit(), timeout=WITHIN)

    assert (saved.step, held) == (4, [{"x": 1}] * 3)
    assert (future.cancel(), future.cancelled()) == (False, False)
    assert policies == [os.SCHED_IDLE] * 2  # of the writing threads


def test_the_error_of_an_awaited_save_is_not_raised_by_the_next_save(
    group: px.WorkerGroup, tmp_path: Path, on_write: Any
) -> None:
    async def awaited(future: px.checkpoint.SaveFuture[Any]) -> None:
        await future

    on_write(late(tmp_path, fails="step-00000001"))
    with px.checkpoint.CheckpointManager(str(tmp_path), {"rows": group}) as run:
        with pytest.raises(px.checkpoint.CheckpointError, match="no such luck"):
            asyncio.run(awaited(run.save.submit(1)))
        on_write(lambda path: None)

        run.save(2)

        assert run.steps() == [2]


def test_a_cancelled_await_does_not_cancel_a_save_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Future[None]()
    monkeypatch.setattr("phalanx.checkpoint.save_future.session.waiters.submit", lambda work: pending)

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(SaveFuture(int, "save", threading.Event()), 0.01)

    asyncio.run(cancelled())
    assert not pending.cancelled()
    pending.set_result(None)


SCRIPT = """
import sys
import torch
import phalanx as px

class Worker(px.Worker):
    def __init__(self):
        px.register_state(self, model={"w": torch.ones(3_000_000)})

def main(path):
    px.init(backend="inline")
    group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False), Worker)
    run = px.checkpoint.CheckpointManager(path, {"group": group})
    run.save.submit(1)

main(sys.argv[1])
"""


@pytest.mark.slow
def test_a_script_that_ends_completes_its_submitted_save(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, timeout=WITHIN)

    assert [(one.number, one.whole) for one in listed(str(tmp_path))] == [(1, True)]


@pytest.mark.parametrize("asked", [False, True])
def test_an_unread_error_of_a_save_is_logged_once_at_exit(
    group: px.WorkerGroup, tmp_path: Path, on_write: Any, caplog: pytest.LogCaptureFixture, asked: bool
) -> None:
    on_write(late(tmp_path, fails="distcp"))
    future = px.save.submit(group, tmp_path, step=3)
    if asked:
        future.exception(WITHIN)

    finish_open_saves()
    finish_open_saves()

    assert caplog.text.count("as step 3 failed, and nobody asked") == (0 if asked else 1)


def test_an_error_of_state_dict_keeps_its_type_and_traceback(here: px.ResourcePool, tmp_path: Path) -> None:
    class Broken(Bag):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        px.save(px.WorkerGroup(here[0:2], Broken), tmp_path)

    assert "in state_dict" in str(caught.value)


def test_the_save_of_a_run_shows_one_progress_bar_for_all_ranks(
    here: px.ResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200, color_system=None)
    groups = {name: px.WorkerGroup(here[0:2], Rows) for name in ("one", "two")}
    with px.checkpoint.CheckpointManager(tmp_path, groups) as run:
        monkeypatch.setattr(progress, "terminal", lambda: console)
        run.save(7)

    shown = text.getvalue()
    assert f"save step 7 of {tmp_path}: written" in shown
    assert "4/4" in shown
    assert "save 'one'" not in shown
