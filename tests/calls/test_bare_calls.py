"""Calls without arguments are sent without a message, and each can be cancelled alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx as px


class Gate(px.Worker):
    """Waits for a file, and counts its calls of ``go``."""

    def __init__(self) -> None:
        self.passed = 0
        self.path = Path()

    @px.register
    def wait_for(self, path: str) -> None:
        self.path = Path(path)

    @px.register
    def hold(self) -> str:
        while not self.path.exists():
            time.sleep(0.01)
        return "opened"

    @px.register
    def go(self) -> int:
        self.passed += 1
        return self.passed


@pytest.fixture(scope="module")
def shared(ray_cluster: None) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        yield px.WorkerGroup(pool, Gate)


@pytest.fixture
def group(shared: Any, tmp_path: Path) -> Any:
    if shared.state != "ready":
        shared.restart()
    shared.wait_for(str(tmp_path / "gate"))
    return shared


def test_a_queued_call_without_arguments_is_cancelled_alone(group: Any, tmp_path: Path) -> None:
    before = group.statistics()["sent_bytes"]
    px.gather(*[group.go.submit() for _ in range(10)])
    assert group.statistics()["sent_bytes"] == before  # they have no message

    (first,) = set(group.go())
    running, dropped, kept = group.hold.submit(), group.go.submit(), group.go.submit()

    assert dropped.cancel()
    (tmp_path / "gate").touch()

    assert running.result() == ["opened", "opened"]
    assert kept.result() == [first + 1, first + 1]
    assert group.state == "ready"

    (tmp_path / "gate").unlink()
    group[1].go()  # a call of a single rank before it
    running, dropped = group.hold.submit(), group.go.submit()
    assert dropped.cancel()
    (tmp_path / "gate").touch()
    assert running.result() == ["opened", "opened"]


def test_a_running_call_is_interrupted_and_queued_calls_continue(group: Any) -> None:
    running, behind = group.hold.submit(), group.go.submit()

    assert running.cancel()

    assert len(behind.result()) == 2
    assert group.state == "ready"
