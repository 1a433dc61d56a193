"""Traces of calls whose ranks hang, die or are cancelled, and of groups with two drivers."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

import phalanx as px
from phalanx.tracing.events import Trace


class Frail(px.Worker):
    @px.register(px.Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return self.rank

    @px.register(px.Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        with px.span("last words"):
            if self.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def hang(self) -> None:
        threading.Event().wait()

    @px.register(px.Dispatch.ONE_TO_ALL)
    def ask(self, other: Any) -> Any:
        with px.trace() as inner:
            other.ping()
        return outcomes(inner.events)


@pytest.fixture
def pool(ray_cluster: None) -> Any:
    with px.ResourcePool([2], use_gpu=False) as made:
        yield made


def outcomes(trace: Trace) -> list[tuple[str, list[bool]]]:
    """Return the method of each call, and whether each rank returned."""
    return [(call.method, [part.returned is not None for part in call.parts]) for call in trace.calls]


def test_a_trace_has_the_events_of_a_rank_before_it_was_killed(pool: px.ResourcePool) -> None:
    with px.trace() as trace, px.WorkerGroup(pool, Frail) as group, pytest.raises(px.WorkerDiedError):
        group.die_on(1)

    assert outcomes(trace.events)[-1] == ("die_on", [True, False])
    assert trace.events.calls[-1].parts[1].started is not None
    assert [s.ended is None for s in trace.events.spans if s.track and s.track.rank == 1] == [True]
    assert trace.events.notes == ()


def test_a_trace_shows_a_cancelled_or_late_call_with_its_error_and_unfinished_ranks(
    pool: px.ResourcePool,
) -> None:
    with px.trace() as trace, px.WorkerGroup(pool, Frail) as group:
        group.ping()
        group.hang.submit().cancel()
        with pytest.raises(px.CallTimeout):
            group.hang.options(timeout=1.0)()
    cancelled, late = [call for call in trace.events.calls if call.method == "hang"]

    assert str(cancelled.error).startswith("CallCancelled")
    # a rank that had not begun the cancelled call records nothing, or an interrupt
    assert all(part.error is None or part.error.startswith("Interrupted") for part in cancelled.parts)
    assert str(late.error).startswith("CallTimeout")
    assert all(part.started is not None and part.returned is None for part in late.parts)


@pytest.mark.slow
def test_each_driver_of_a_group_traces_only_its_own_calls(pool: px.ResourcePool) -> None:
    with (
        px.trace() as trace,
        px.WorkerGroup(pool[0:1], Frail, name="callee") as callee,
        px.WorkerGroup(pool[1:2], Frail, name="caller") as caller,
    ):
        callee.ping()
        seen = caller.ask(callee)

    assert seen == [[("ping", [True])]]
    found = [(call.group, call.method) for call in trace.events.calls if call.method != "__init__"]
    assert found == [("callee", "ping"), ("caller", "ask")]


def test_an_attached_driver_traces_its_calls_of_a_detached_group(ray_cluster: None) -> None:
    with px.ResourcePool([1], use_gpu=False, detached=True) as pool:
        owned = px.WorkerGroup(pool, Frail, name="traced-detached", detached=True)
        try:
            with px.trace() as trace:
                px.attach("traced-detached").ping()
        finally:
            owned.close()

    assert outcomes(trace.events) == [("ping", [True])]
    assert [track.pid > 0 for track in trace.events.tracks] == [True]
