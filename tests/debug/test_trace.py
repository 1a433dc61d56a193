"""``px.trace`` on groups of every backend: records of calls that succeed, fail, hang or die, and of starts."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider

import phalanx as px
from phalanx.calls.call_state import SILENT, listening
from phalanx.tracing.events import WAITING, RankSpan, Trace, TracedCall
from phalanx.tracing.files import load
from phalanx.tracing.spans import process
from tests.support.scripts import start

SLOW_ON_RAY = True

BY_VALUE = True


class Traced(px.Worker):
    def __init__(self) -> None:
        self.value = 0

    @px.register(px.Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        return None

    @px.register(px.Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        with px.span("adding", x=x):
            self.value += x
        return self.value

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @px.register(px.Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError("as told")
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
            other.empty()
        return outcomes(inner.events)

    @px.register(px.Dispatch.ONE_TO_ALL, rerun_on_restart=True)
    def load(self, value: int) -> None:
        self.value = value


class Broken(px.Worker):
    def __init__(self) -> None:
        raise RuntimeError("never")


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:2], Traced, name="traced")


def calls_of(trace: Trace, method: str) -> list[TracedCall]:
    return [call for call in trace.calls if call.method == method]


def times(part: RankSpan) -> list[int]:
    found = [part.received, part.started, part.finished, part.returned, part.fetched]
    return [time for time in found if time is not None]


def test_a_trace_records_every_time_of_a_call_in_order(group: Any) -> None:
    with px.trace() as trace:
        group.add(1)
        group.empty()

    assert [call.method for call in trace.events.calls] == ["add", "empty"]
    for call in trace.events.calls:
        assert [part.rank for part in call.parts] == [0, 1]
        for part in call.parts:
            known = [call.planned or 0, *times(part)]
            assert len(known) == 6
            assert known == sorted(known)
        marks = [call.began, call.planned, call.sent, call.asked, call.fetched, call.ended]
        assert marks == sorted(marks)  # type: ignore[type-var]


def test_a_trace_records_the_bytes_sources_and_output_times_of_calls(group: Any) -> None:
    rows = torch.ones(300_000, 1)
    with px.trace() as trace:
        group.double(group.double.submit(rows))
        list(group.add.stream(1))
    one, two, streamed = trace.events.calls

    assert one.stored_bytes >= rows.nbytes
    assert one.message_bytes > 0
    for part in one.parts:
        assert part.argument_bytes >= rows.nbytes // 2
        assert part.result_bytes >= rows.nbytes // 2
    assert (one.sources, two.sources) == ((), (one.id,))
    assert (one.ended, one.asked) == (None, None)
    assert all(part.fetched is not None for part in streamed.parts)
    assert streamed.ended is not None
    # each call is on two ranks
    assert trace.to_opentelemetry(TracerProvider()) == 9 + len(trace.events.spans)


def test_a_trace_records_the_rank_of_a_failed_call_and_the_error_of_an_unsent_call(group: Any) -> None:
    with px.trace() as trace:
        _ = group.fail_on.submit(1)
        with pytest.raises(ValueError):
            group.fail_on(1)
        with pytest.raises(px.DispatchError):
            group.add(threading.Lock())
    unread, failed, unsent = trace.events.calls

    assert (unread.error, unread.ended) == ("ValueError: as told", None)
    assert [part.error for part in failed.parts] == [None, "ValueError: as told"]
    assert str(failed.error).startswith("RemoteCallError[ValueError]: ")
    assert (unsent.sent, unsent.message_bytes) == (None, 0)
    assert str(unsent.error).startswith("DispatchError")
    assert all(part.received is None for part in unsent.parts)


def test_a_trace_records_calls_of_views_and_functions_but_not_of_the_library(group: Any) -> None:
    with px.trace() as trace:
        group[1].add(1)
        group.any.add(1)
        group.execute_all_sync("add", x=1)
        group.execute_rank_zero_sync("add", 1)
        group.run(lambda worker: worker.rank)
        with pytest.raises(px.DispatchError):
            group.mesh("none")  # a call of the library
    found = [(call.method, [part.rank for part in call.parts]) for call in trace.events.calls]

    assert found[0] == ("add", [1])
    assert found[1] in (("add", [0]), ("add", [1]))
    assert found[2:] == [("add", [0, 1]), ("add", [0]), ("run <lambda>", [0, 1])]
    assert all(part.returned is not None for call in trace.events.calls for part in call.parts)


def test_a_trace_can_be_started_once_and_records_calls_until_it_is_stopped(group: Any) -> None:
    trace = px.trace()
    with pytest.raises(px.DeclarationError, match="not started"):
        trace.summary()
    group.add(1)
    trace.start()
    with pytest.raises(px.DeclarationError, match="already started"):
        trace.start()
    group.add(2)
    trace.stop()
    trace.stop()
    group.add(3)

    assert len(trace.events.calls) == 1
    assert (listening.current, process.sink) == (SILENT, None)
    assert not any(group.run(lambda worker: process.sink is not None))


def test_traces_can_be_nested_and_summarized_while_they_record(group: Any) -> None:
    with px.trace() as outer:
        group.add(1)
        early = outer.summary()
        with px.trace() as inner:
            group.add(2)
        group.add(3)

    assert (len(outer.events.calls), len(inner.events.calls)) == (3, 1)
    assert all(len(times(part)) == 5 for part in inner.events.calls[0].parts)
    assert [seen.to_dict()["methods"][0]["calls"] for seen in (early, outer.summary())] == [1, 3]


def test_a_trace_that_fails_to_stop_does_not_stop_another_trace(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, other = px.trace().start(), px.trace().start()
    with monkeypatch.context() as patch:
        patch.setattr(type(failing), "events", property(Mock(side_effect=MemoryError)))
        with pytest.raises(MemoryError):
            failing.stop()
    failing.stop()
    group.add(1)

    assert len(calls_of(other.events, "add")) == 1
    other.stop()


def test_a_trace_records_calls_of_several_threads_and_drops_the_oldest_beyond_its_limit(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(x: int) -> None:
        with px.span("step"):
            group.add(x)

    with px.trace() as trace, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(40)))
    of_driver = [span for span in trace.events.spans if span.track is None]
    assert (len({call.id for call in trace.events.calls}), len(of_driver)) == (40, 40)

    monkeypatch.setattr("phalanx.debug.trace.LIMIT", 4)  # two calls of two ranks
    with px.trace() as trace:
        for x in range(5):
            group.add(x)
        with px.trace() as inner:
            for x in range(3):
                group.add(x)
    assert [call.id for call in trace.events.calls] == [7, 8]
    assert "The first 6 calls are left out" in trace.events.notes[-1]
    assert "The first 1 calls are left out" in inner.events.notes[-1]


def test_a_failed_block_writes_its_trace_file_and_a_failed_write_hides_no_error(
    group: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError), px.trace(tmp_path / "run.json"):
        group.fail_on(0)
    assert [call.method for call in load(tmp_path / "run.json").calls] == ["fail_on"]

    with pytest.raises(ValueError), px.trace(tmp_path / "runs" / "run.json"):
        (tmp_path / "runs").rmdir()
        (tmp_path / "runs").write_text("in the way of the folder")
        group.fail_on(0)


@pytest.mark.slow_on_cluster
def test_a_trace_records_a_successful_or_failed_start_of_a_group_and_closes_its_tracks(
    pool: px.ResourcePool,
) -> None:
    with px.trace() as trace:
        px.WorkerGroup(pool[0:2], Traced).close()
    with px.trace() as failing, pytest.raises(px.WorkerInitError):
        px.WorkerGroup(pool[0:2], Broken)
    (made,), (failed,) = trace.events.calls, failing.events.calls

    assert (made.method, len(made.parts)) == ("__init__", 2)
    assert all(part.returned is not None and part.fetched is not None for part in made.parts)
    assert all(track.opened and track.closed and track.pid for track in trace.events.tracks)
    assert failed.error is not None
    # a rank may be stopped before its constructor runs
    assert "RuntimeError: never" in [part.error for part in failed.parts]


@pytest.mark.soak_on_cluster
def test_colocated_roles_share_tracks_and_groups_with_equal_names_are_numbered(pool: px.ResourcePool) -> None:
    roles = px.colocate({"actor": Traced, "critic": Traced})
    with px.trace() as trace:
        for _ in range(2):
            with px.WorkerGroup(pool[0:2], roles, name="twin") as group:
                group.actor.add(1)
                group.critic.add(2)
    events = trace.events

    assert events.groups == ("twin", "twin (2)")
    assert [call.name for call in events.calls if call.group == "twin"][1:] == ["actor.add", "critic.add"]
    assert len(events.tracks) == 4
    assert all(part.returned for call in events.calls for part in call.parts)


@pytest.mark.slow
def test_each_epoch_of_a_restarted_group_has_its_own_tracks(pool: px.ResourcePool) -> None:
    with px.trace() as trace, px.WorkerGroup(pool[0:2], Traced, name="again") as group:
        group.load(5)
        group.restart()
        group.add(1)
    events = trace.events

    tracks = sorted({(track.key.epoch, track.key.rank) for track in events.tracks})
    assert tracks == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(call.method, call.epoch) for call in events.calls if call.method == "add"] == [("add", 1)]
    assert all(part.returned for call in events.calls for part in call.parts)


def test_a_resize_ends_the_tracks_of_the_previous_epoch(pool: px.ResourcePool) -> None:
    with px.WorkerGroup(pool[0:2], Server, name="smaller") as group:
        with px.trace() as trace:
            group.wait()
            px.resize(group, 1)
            group.wait()
        assert not group.core.before_end
    tracks = trace.events.tracks

    assert [(track.key.rank, track.closed is None) for track in tracks] == [(0, False), (1, False), (0, True)]


def test_calls_of_asynchronous_ranks_overlap_and_have_all_times_and_their_own_spans(
    backend: str, pool: px.ResourcePool
) -> None:
    together = 3 if backend == "ray" else 1  # inline, each call runs to its end
    with px.trace() as trace, px.WorkerGroup(pool[0:1], Server, max_concurrency=4, name="server") as group:
        px.gather(*[group.ask.submit(n, together) for n in range(3)])
    events = trace.events
    parts: Any = [part for call in calls_of(events, "ask") for part in call.parts]

    assert all(len(times(part)) == 5 for part in parts)
    assert (max(part.started for part in parts) < min(part.finished for part in parts)) == (together == 3)
    assert {span.attributes["n"]: span.call for span in events.spans} == {
        n: call.id for n, call in enumerate(calls_of(events, "ask"))
    }


class Server:
    independent = True

    def __init__(self) -> None:
        self.asked, self.all_asked = 0, asyncio.Event()

    @px.register
    def wait(self) -> None:
        return None

    @px.register(px.Dispatch.ONE_TO_ALL)
    async def ask(self, n: int, together: int) -> int:
        self.asked += 1
        if self.asked >= together:
            self.all_asked.set()
        with px.span("answering", n=n):
            await self.all_asked.wait()
        return n


def test_unreadable_events_of_a_rank_are_a_note_and_not_an_error(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with px.trace() as trace:
        group.add(1)
        monkeypatch.setattr(group.core.backend, "read", Mock(side_effect=OSError("nothing answers")))
    events = trace.events

    assert events.notes == tuple(
        f"The trace file of rank {r} of traced cannot be read: nothing answers" for r in (0, 1)
    )
    assert all(part.received is None and part.fetched is not None for part in events.calls[0].parts)


def test_a_trace_counts_the_items_of_channels_that_are_used() -> None:
    with px.Channel(name="traced", backend="inline") as channel:
        channel.put(0)
        with px.trace() as trace, px.Channel(name="later", backend="inline") as later:
            assert trace.events.counters == ()
            channel.put(1)
            channel.put(2)
            channel.get()
            (counter,) = trace.events.counters
            later.put(0)
            assert len(trace.events.counters) == 2

    # the last value follows the acknowledgement
    assert (counter.name, counter.values[WAITING]) == ("channel traced", (2, 3, 2, 2))


@pytest.fixture
def pair(ray_cluster: None) -> Iterator[px.ResourcePool]:
    """Two slots on Ray, for ranks that die or hang."""
    with px.ResourcePool([2], use_gpu=False, backend="ray") as made:
        yield made


def outcomes(trace: Trace) -> list[tuple[str, list[bool]]]:
    """Return the method of each call, and whether each rank returned."""
    return [(call.method, [part.returned is not None for part in call.parts]) for call in trace.calls]


def test_a_trace_has_the_events_of_a_rank_before_it_was_killed(pair: px.ResourcePool) -> None:
    with px.trace() as trace, px.WorkerGroup(pair, Traced) as group, pytest.raises(px.WorkerDiedError):
        group.die_on(1)

    assert outcomes(trace.events)[-1] == ("die_on", [True, False])
    assert trace.events.calls[-1].parts[1].started is not None
    assert [s.ended is None for s in trace.events.spans if s.track and s.track.rank == 1] == [True]
    assert trace.events.notes == ()


def test_a_trace_shows_a_cancelled_or_late_call_with_its_error_and_unfinished_ranks(
    pair: px.ResourcePool,
) -> None:
    with px.trace() as trace, px.WorkerGroup(pair, Traced) as group:
        group.empty()
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
def test_each_driver_of_a_group_traces_only_its_own_calls(pair: px.ResourcePool) -> None:
    with (
        px.trace() as trace,
        px.WorkerGroup(pair[0:1], Traced, name="callee") as callee,
        px.WorkerGroup(pair[1:2], Traced, name="caller") as caller,
    ):
        callee.empty()
        seen = caller.ask(callee)

    assert seen == [[("empty", [True])]]
    found = [(call.group, call.method) for call in trace.events.calls if call.method != "__init__"]
    assert found == [("callee", "empty"), ("caller", "ask")]


def test_an_attached_driver_traces_its_calls_of_a_detached_group(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_BACKEND", "ray")  # where px.attach looks
    with px.ResourcePool([1], use_gpu=False, detached=True) as pool:
        owned = px.WorkerGroup(pool, Traced, name="traced-detached", detached=True)
        try:
            with px.trace() as trace:
                px.attach("traced-detached").empty()
        finally:
            owned.close()

    assert outcomes(trace.events) == [("empty", [True])]
    assert [track.pid > 0 for track in trace.events.tracks] == [True]


SCRIPT = """
import phalanx as px

if __name__ == "__main__":
    pool = px.ResourcePool([2], use_gpu=False)
    group = px.WorkerGroup(pool, px.Worker)
    group.run(type)
    {end}
"""


@pytest.mark.parametrize(
    "end", ["px.shutdown()", pytest.param("raise SystemExit(3)", marks=pytest.mark.slow)]
)
def test_the_trace_variable_records_a_complete_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    (tmp_path / "driver.py").write_text(SCRIPT.format(end=end))
    monkeypatch.setenv("PHALANX_TRACE", "out/run.json")
    monkeypatch.delenv("PHALANX_PROCESS", raising=False)
    start(tmp_path / "driver.py", backend="inline", folder=tmp_path)

    assert [call.method for call in load(tmp_path / "out/run.json").calls] == ["__init__", "run type"]
