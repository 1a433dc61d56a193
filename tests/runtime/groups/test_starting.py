"""What is shown while a group starts."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import phalanx as px
from phalanx.runtime.groups import startbar as starting
from phalanx.runtime.groups.startbar import Starting
from phalanx.transport.base import Sight

STACK = '  File "/home/me/train.py", line 9 in __init__'


class Backend:
    """Ranks of which the first ones are ready."""

    immediate = False

    def __init__(self, ready: int, sight: Sight) -> None:
        self._ready = ready
        self._sight = sight

    def wait(self, refs: Any, count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        return list(range(self._ready)), list(range(self._ready, len(refs)))

    def sights(self, endpoints: Any, stacks: bool) -> list[Sight]:
        return [self._sight]


def looked(ready: int, sight: Sight) -> tuple[int, str]:
    backend: Any = Backend(ready, sight)
    shown = Starting(backend, "trainer", 4)
    endpoints: Any = list("abcd")
    shown.watch(endpoints, list("abcd"))
    return shown.look()


def test_ranks_that_are_ready_are_counted_and_the_first_that_is_not_is_looked_at() -> None:
    assert looked(3, Sight(True, stack=STACK)) == (3, "rank 3: __init__ at train.py:9")


def test_a_rank_without_a_stack_says_why() -> None:
    assert looked(0, Sight(False, note="its process is gone")) == (0, "rank 0: its process is gone")


def test_when_all_are_ready_nothing_is_waited_for() -> None:
    assert looked(4, Sight(True)) == (4, "")


def test_before_the_processes_are_there_that_is_what_is_waited_for() -> None:
    backend: Any = Backend(0, Sight(True))

    assert Starting(backend, "trainer", 4).look() == (0, "waiting for processes")


@pytest.mark.slow
def test_a_start_that_takes_its_time_is_shown(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(starting, "terminal", lambda: console)
    monkeypatch.setattr(starting, "PATIENCE_S", 0.0)

    class Slow(px.Worker):
        def __init__(self) -> None:
            import time

            if self.rank == 1:
                time.sleep(2.5)

    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        px.WorkerGroup(pool, Slow, name="slow", show_ranks="none")

    assert "starting slow" in text.getvalue()
    assert "1/2" in text.getvalue()
    assert "rank 1: __init__ at test_starting.py" in text.getvalue()
