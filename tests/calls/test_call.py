"""A call from submission to outcome, on ranks that a script delays, ends and loses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

import phalanx as px
from phalanx.backends.backend_types import Endpoint, FetchFailed, Lost
from phalanx.backends.inline import InlineRank
from phalanx.calls.call_state import CallInfo, CallListener, listening
from phalanx.calls.health_check import look_after
from phalanx.testing.scripted import Event, ScriptedBackend, scripted
from phalanx.wire import unpack
from phalanx.wire.failure import capture
from phalanx.wire.memory import HUGE_FROM

LATE, DEAD, FAULT = object(), object(), object()
EVENTS: dict[int, Event] = {id(LATE): "hang", id(DEAD): "die", id(FAULT): "raise"}


class Worker(px.Worker):
    @px.register(px.Dispatch.ALL_TO_ALL)
    def answer(self, outcome: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Ends(CallListener):
    """Records the numbers of calls that are waited for, and of calls that end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked_for: list[int] = []
        self.over: list[int] = []
        self._error = error

    def asked(self, call: CallInfo) -> None:
        self.asked_for.append(call.number)

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        self.over.append(call.number)
        if self._error is not None:
            raise self._error


class Ranks:
    """A group whose calls have given outcomes. Records the ranks that are severed from their peers or killed."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.events: deque[Event] = deque()
        self.severed: list[int] = []
        self.killed: list[int] = []
        self.group: Any = None
        kill, self.backend = backend.kill, cast(Any, backend)
        self.backend.kill = lambda ended: (self.killed.extend(map(self.rank_of, ended)), kill(ended))[1]
        self.backend.sever = lambda cut: self.severed.extend(map(self.rank_of, cut))

    def script(self, what: str, number: int) -> Event:
        return self.events.popleft() if what == "call" and self.events else "fine"

    def rank_of(self, endpoint: Endpoint) -> int:
        return endpoint.slot.bundle

    def submit(self, *outcomes: Any, **options: Any) -> px.CallFuture[Any]:
        """Send a call that ends on each rank with an outcome.

        An outcome is a value or an exception of the worker, ``LATE`` (no end), ``DEAD`` (its process dies), or
        ``FAULT`` (an error that leaves no frames of a worker in this process).
        """
        if self.group is None:
            pool = px.ResourcePool([len(outcomes)], use_gpu=False, backend="inline")
            self.group = px.WorkerGroup(pool, Worker)
        self.events.extend(EVENTS.get(id(outcome), "fine") for outcome in outcomes)
        return self.group.answer.options(**options).submit(list(outcomes))

    def end(self, rank: int, error: Exception, accelerator: str | None = None) -> None:
        """End the call of a late rank with an error."""
        for ref, result in list(self.backend._results.items()):
            if self.rank_of(result.endpoint) == rank and result.at > self.backend.now():
                ref.failure = capture(error, rank=rank, accelerator=accelerator)
                self.backend._results[ref] = result._replace(at=self.backend.now())

    def lose(self, *ranks: int) -> None:
        """End processes without a report of their deaths."""
        self.backend.dead_of = lambda endpoints: []
        for rank in ranks:
            self.group.core.endpoints[rank].handle.end(Lost("its node was lost", "node lost"))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with scripted(lambda what, number: made.script(what, number)) as backend:
        made = Ranks(backend)
        yield made
        made.group.pool.close()


def test_an_error_of_the_driver_while_it_copies_a_value_is_raised(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(views: Any) -> Any:
        monkeypatch.undo()
        raise MemoryError("no room here")

    large = np.zeros(HUGE_FROM, np.uint8)
    future = ranks.submit(large, 1)
    stored = px.put(large, backend="inline")

    monkeypatch.setattr(unpack, "private_copies", fail_once)
    with pytest.raises(MemoryError, match="no room here"):
        future.result()
    monkeypatch.setattr(unpack, "private_copies", fail_once)
    with pytest.raises(px.PhalanxError, match="cannot be fetched: no room here"):
        stored.get()
    assert ranks.group.state == "ready"


def test_dead_ranks_are_the_cause_if_only_peers_reported_a_lost_connection(ranks: Ranks) -> None:
    reset = RuntimeError("[gloo/transport/tcp/pair.cc:547] Read error: Connection reset by peer")
    future = ranks.submit(reset, LATE, LATE, LATE)
    ranks.lose(2, 3)

    with pytest.raises(px.WorkerDiedError, match="node lost") as caught:
        future.result()

    assert (caught.value.cause_ranks, caught.value.victims) == ((2, 3), (0, 1))
    assert "ranks 2-3" in str(caught.value).partition("\n")[0]
    assert caught.value.lost
    assert ranks.killed == [1]


def test_a_rank_with_an_error_of_its_own_is_the_cause_although_another_rank_died(ranks: Ranks) -> None:
    future = ranks.submit(ValueError("odd"), LATE)
    ranks.lose(1)

    with pytest.raises(px.RemoteCallError, match="odd") as caught:
        future.result()

    assert (caught.value.cause_ranks, caught.value.lost) == ((0,), False)


def failed(future: px.CallFuture[Any]) -> None:
    with pytest.raises(ValueError, match="odd"):
        future.result()


def expired(future: px.CallFuture[Any]) -> None:
    for _ in range(2):  # each caller gets the same outcome
        with pytest.raises(px.CallTimeout) as caught:
            future.result()
        assert caught.value.timeout == 5.0


def cancelled(future: px.CallFuture[Any]) -> None:
    assert future.cancel()
    with pytest.raises(px.CallCancelled):
        future.result()


@pytest.mark.parametrize(
    ("end", "outcomes", "options", "severed"),
    [
        (failed, [ValueError("odd"), LATE, 1], {}, []),
        (expired, [1, LATE], {"timeout": 5.0}, []),
        (cancelled, [1, LATE], {}, [1]),
    ],
)
def test_ranks_that_outlive_their_call_are_stopped_and_the_group_is_broken(
    ranks: Ranks, end: Callable[[Any], None], outcomes: list[Any], options: dict[str, Any], severed: list[int]
) -> None:
    end(ranks.submit(*outcomes, **options))

    assert (ranks.severed, ranks.killed, ranks.group.state) == (severed, [1], "broken")


def test_a_stalled_call_is_reported_each_time_its_interval_has_passed(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    future, reported = ranks.submit(LATE, 1, stall_report_after=10.0), list[int]()

    for _ in range(7):
        look_after(ranks.group.core)
        reported.append(sum("stalled" in record.getMessage() for record in caplog.records))
        ranks.backend.clock.advance(5.0)

    assert reported == [0, 0, 1, 1, 2, 2, 3]
    assert not future.done()


@pytest.mark.parametrize(("in_flight", "seconds"), [(False, 5.0), (True, 1.0)])
def test_a_hanging_close_of_a_worker_delays_the_end_of_its_group_only_for_a_while(
    ranks: Ranks, in_flight: bool, seconds: float
) -> None:
    future = ranks.submit(LATE if in_flight else 1, 1)
    assert future.done() is not in_flight
    ranks.events.extend(["hang", "hang"])

    ranks.group.close()

    assert (ranks.backend.now(), ranks.killed) == (seconds, [0, 1])


def test_a_call_that_ends_with_stopped_ranks_names_the_cause_of_the_stop(ranks: Ranks) -> None:
    told: list[BaseException | None] = []
    other = ranks.submit(LATE, LATE)
    call, kill = ranks.submit(ValueError("odd"), LATE), ranks.backend.kill

    def ask_the_other(stopped: Sequence[Endpoint]) -> tuple[int, ...]:
        ranks.backend.kill = kill
        still_there = kill(stopped)
        told.append(other.exception())
        return still_there

    ranks.backend.kill = ask_the_other
    with pytest.raises(ValueError):
        call.result()

    assert isinstance(told[0], px.GroupBroken)
    assert "odd" in str(told[0])


def test_a_call_of_a_view_reports_that_the_owner_closed_the_group(ranks: Ranks) -> None:
    call = ranks.submit(LATE)
    ranks.group.core.owner = False

    ranks.backend.kill(ranks.group.core.endpoints)

    with pytest.raises(px.GroupClosed, match="by its owner"):
        call.result()
    assert ranks.group.closed


CLOSED = "Connection closed by peer"


@pytest.mark.parametrize(
    ("count", "said", "on", "severed", "killed", "state"),
    [
        (4, CLOSED, None, [2, 3], [3], "broken"),  # rank 3 is stopped
        (3, CLOSED, None, [2], [], "broken"),  # a severed process group is useless
        (3, "interrupted", "GPU 0", [2], [], "broken"),  # an operation of NCCL ended without an error
        (3, "interrupted", None, [2], [], "ready"),  # without a process group
        (2, CLOSED, "GPU 0", [], [], "ready"),  # interrupted in time
    ],
)
def test_spared_peers_of_a_failed_call_are_interrupted_then_severed_then_killed(
    ranks: Ranks, count: int, said: str, on: str | None, severed: list[int], killed: list[int], state: str
) -> None:
    """Rank 1 ends its call when it is interrupted, rank 2 once its connections are cut, rank 3 never."""
    call = ranks.submit(ValueError("bad batch"), *[LATE] * (count - 1))
    cancel, sever = ranks.backend.cancel, ranks.backend.sever
    ranks.backend.cancel = lambda *which: (ranks.end(1, RuntimeError("interrupted")), cancel(*which))[1]
    ranks.backend.sever = lambda cut: (ranks.end(2, RuntimeError(said), on), sever(cut))[1]
    ranks.group.core.spare = True

    with pytest.raises(ValueError, match="bad batch") as raised:
        call.result()

    assert (ranks.severed, ranks.killed, ranks.group.state) == (severed, killed, state)
    assert cast(px.CallError, raised.value).victims == tuple(range(1, count))


def test_a_failure_during_a_cancel_waits_for_the_outcome_of_the_cancel(ranks: Ranks) -> None:
    cancelling, go_on = threading.Event(), threading.Event()
    seen: list[type] = []
    call = ranks.submit(1, LATE)

    def cancel(endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        cancelling.set()
        go_on.wait(10)
        return [True] * len(endpoints)

    ranks.backend.cancel = cancel
    canceller = threading.Thread(target=call.cancel)
    asker = threading.Thread(target=lambda: seen.append(type(call.exception())))
    canceller.start()
    cancelling.wait(10)
    ranks.end(1, ValueError("interrupted"))
    asker.start()
    go_on.set()
    for thread in (canceller, asker):
        thread.join(10)

    assert seen == [px.CallCancelled]


def test_a_stream_of_a_failed_call_yields_finished_outputs_before_the_error(ranks: Ranks) -> None:
    future: Any = ranks.submit(1, ValueError("odd"), LATE)
    assert future.call.has_failed()
    given: list[Any] = []

    with pytest.raises(px.RemoteCallError):
        given.extend(future.stream())

    assert given == [(0, 1)]


def test_a_failed_call_its_argument_and_its_error_are_freed_without_garbage_collection(ranks: Ranks) -> None:
    class Argument:
        pass

    def fail(argument: Argument) -> px.CallFuture[Any]:
        future = ranks.submit(FAULT)
        try:
            future.result()
        except px.RemoteCallError:
            return future
        raise LookupError

    ranks.submit(1).result()
    gc.disable()
    try:
        argument = Argument()
        seen = weakref.ref(argument)
        future: Any = fail(argument)
        del argument
        assert seen() is None
        assert isinstance(future.exception(), px.RemoteCallError)
        kept = [weakref.ref(future.call), weakref.ref(future.exception())]
        del future
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def test_a_call_that_a_restart_ended_is_freed_without_garbage_collection(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    future: Any = ranks.submit(FAULT)
    core = ranks.group.core
    restarted = replace(core.endpoints[0], handle=InlineRank(None))

    def restarted_meanwhile(timeout: float | None) -> Any:
        core.begin_restart()
        core.enter([restarted])
        raise FetchFailed

    monkeypatch.setattr(future.call.arrivals, "fetch", restarted_meanwhile)
    gc.disable()
    try:
        with pytest.raises(px.errors.StaleEpoch):
            future.result()
        seen = weakref.ref(future.call)
        del future
        monkeypatch.undo()
        assert seen() is None
    finally:
        gc.enable()


def test_a_group_broken_during_a_stream_keeps_no_frames_of_the_reader(ranks: Ranks) -> None:
    with pytest.raises(px.WorkerDiedError):
        list(ranks.submit(DEAD, 1).stream())

    cause = ranks.group.core.lifecycle.cause
    assert cause is not None
    assert cause.__traceback__ is None


@pytest.mark.parametrize(
    ("outcomes", "ask"),
    [
        ([1, 2], lambda future: future.result()),
        ([1, 2], lambda future: list(future.stream())),
        ([ValueError("odd"), 2], lambda future: future.exception()),
    ],
    ids=["result", "stream", "failure"],
)
def test_a_listener_is_notified_once_of_the_end_of_a_call(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, outcomes: list[Any], ask: Callable[[Any], object]
) -> None:
    started = ranks.submit(1, [2])
    assert started.result() is started.result()  # a result is kept
    monkeypatch.setattr(listening, "current", heard := Ends())
    future = ranks.submit(*outcomes)

    ask(future)
    ask(future)

    assert heard.over == [future.call.number]


def test_only_the_listener_at_submission_is_notified_of_a_call(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.submit(0, 0).result()  # starts the group
    monkeypatch.setattr(listening, "current", early := Ends())
    futures = [ranks.submit(1, 2), ranks.submit(3, 4)]
    monkeypatch.setattr(listening, "current", late := Ends())

    px.gather(*futures)

    assert early.asked_for == early.over == [future.call.number for future in futures]
    assert late.asked_for == late.over == []


def test_a_call_returns_although_its_listener_raises(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.submit(0, 0).result()  # starts the group
    monkeypatch.setattr(listening, "current", Ends(RuntimeError("out of ink")))

    assert ranks.submit(1, 2).result() == [1, 2]
    assert "the trace lacks the end of answer of group" in caplog.text
