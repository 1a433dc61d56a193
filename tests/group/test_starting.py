"""Progress that is shown while a group starts, and starts in waves."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import phalanx as px
from phalanx.backends.backend_types import ProcessStatus, ResultHandle
from phalanx.backends.ray import backend as ray_backend
from phalanx.backends.ray import private
from phalanx.calls.call_state import Results
from phalanx.members import processes
from phalanx.members.processes import start_status
from tests.support.fault_workers import within

STACK = '  File "/home/me/train.py", line 9 in __init__'


class Backend:
    """A backend on which the first ranks are ready."""

    immediate = False

    def __init__(self, ready: int, status: ProcessStatus) -> None:
        self._ready = ready
        self._sight = status

    def wait(self, refs: Any, count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        return list(range(self._ready)), list(range(self._ready, len(refs)))

    def inspect(self, endpoints: Any, stacks: bool) -> list[ProcessStatus]:
        return [self._sight]


def looked(ready: int, status: ProcessStatus, sent: bool) -> tuple[int, str]:
    backend: Any = Backend(ready, status)
    epoch = SimpleNamespace(endpoints="abcd")
    core = SimpleNamespace(backend=backend)
    arrivals = Results(backend, [ResultHandle(ref) for ref in "abcd"])
    call: Any = SimpleNamespace(core=core, epoch=epoch, was_sent=sent, arrivals=arrivals)
    return start_status(call)


@pytest.mark.parametrize(
    ("ready", "status", "sent", "text"),
    [
        (3, ProcessStatus(True, stack=STACK), True, "rank 3: __init__ at train.py:9"),
        (3, ProcessStatus(True, note="busy"), True, "rank 3: busy"),
        (0, ProcessStatus(False, note="its process has ended"), True, "rank 0: its process has ended"),
        (4, ProcessStatus(True), True, ""),
        (0, ProcessStatus(True), False, "waiting for processes"),
    ],
    ids=["a stack", "a note", "a process that died", "all are ready", "no process yet"],
)
def test_the_start_status_counts_ready_ranks_and_describes_the_first_other_rank(
    ready: int, status: ProcessStatus, sent: bool, text: str
) -> None:
    assert looked(ready, status, sent) == (ready, text)


@pytest.mark.slow
def test_a_slow_start_is_shown_with_the_stack_of_a_late_rank(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(processes, "terminal", lambda: console)
    monkeypatch.setattr(processes, "SHOWN_AFTER_S", 0.0)

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


@pytest.mark.slow
def test_ranks_started_in_waves_keep_their_order_and_a_start_that_times_out_leaves_none(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, made = ray_backend._create, list[Any]()
    monkeypatch.setattr(ray_backend, "WAVE", 2)
    monkeypatch.setattr(ray_backend, "_create", lambda *of: made.append(create(*of)) or made[-1])
    with px.ResourcePool([3, 2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, px.Worker)
        places = group.run(lambda worker: (worker.rank, worker.local_rank))
        assert places == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
        with pytest.raises(px.PlacementError):
            px.WorkerGroup(pool, px.Worker, start_timeout=0.01)
        ids = list(map(private.actor_id, made[5:]))
        assert within(10.0, lambda: set(map(private.actor_states(), ids)) == {private.DEAD})
