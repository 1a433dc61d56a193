"""A call from its sending to its end, on ranks that are values."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

import phalanx as px
from phalanx.backends.backend_types import Endpoint, FetchFailed, Lost
from phalanx.calls.call import Call
from phalanx.calls.future import CallFuture
from phalanx.calls.listeners import CallInfo, CallListener, Listeners
from phalanx.group.lifecycle import State
from tests.calls.fake_ranks import LATE, FakeArrivals, FakeBackend, call_on, endpoints, group_of


def test_a_value_stays() -> None:
    call = call_on(group_of(1), [1])

    assert call.result(None) is call.result(None)


def test_a_loss_that_only_its_peers_have_told_of_is_the_cause() -> None:
    transport = FakeBackend(gone={2, 3})
    group = group_of(4, transport)
    reset = RuntimeError("[gloo/transport/tcp/pair.cc:547] Read error: Connection reset by peer")

    with pytest.raises(px.WorkerDiedError, match="node lost") as caught:
        call_on(group, reset, LATE, LATE, LATE).result(None)

    assert (caught.value.cause_ranks, caught.value.victims) == ((2, 3), (0, 1))
    assert "ranks 2-3" in str(caught.value).partition("\n")[0]
    assert caught.value.lost
    assert transport.killed == [1]


def test_a_rank_that_raised_an_error_of_its_own_is_the_cause_though_others_died_unnoticed() -> None:
    with pytest.raises(px.RemoteCallError, match="odd") as caught:
        call_on(group_of(2, FakeBackend(gone={1})), ValueError("odd"), LATE).result(None)

    assert (caught.value.cause_ranks, caught.value.lost) == ((0,), False)


def failed(call: Call) -> None:
    for _ in range(2):  # the same end for everybody who asks
        with pytest.raises(ValueError, match="odd"):
            call.result(None)


def expired(call: Call) -> None:
    for _ in range(2):
        with pytest.raises(px.CallTimeout) as caught:
            call.result(None)
        assert caught.value.timeout == 5.0


def cancelled(call: Call) -> None:
    assert call.cancel()
    with pytest.raises(px.CallCancelled):
        call.result(None)


@pytest.mark.parametrize(
    ("end", "outcomes", "options", "severed", "killed", "state"),
    [
        (failed, [ValueError("odd"), LATE, 1], {}, [], [1], State.BROKEN),
        (failed, [ValueError("odd"), LATE, 1], {"acts": False}, [], [], State.READY),
        (expired, [1, LATE], {"limit": 5.0}, [], [1], State.BROKEN),
        (cancelled, [1, LATE], {}, [1], [1], State.BROKEN),
    ],
    ids=["failed", "failed while the group starts", "expired", "cancelled"],
)
def test_ranks_that_do_not_end_with_their_call_are_stopped_and_the_group_is_broken(
    end: Callable[[Call], None],
    outcomes: list[Any],
    options: dict[str, Any],
    severed: list[int],
    killed: list[int],
    state: State,
) -> None:
    backend = FakeBackend()
    group = group_of(len(outcomes), backend)

    end(call_on(group, *outcomes, **options))

    assert (backend.severed, backend.killed, group.lifecycle.state) == (severed, killed, state)


def test_a_call_that_goes_down_with_stopped_ranks_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    group, told = group_of(2), list[BaseException | None]()
    other = call_on(group, Lost("stopped"), Lost("stopped"))

    def ask_the_other(stopped: object) -> tuple[int, ...]:
        told.append(CallFuture(other).exception())
        return ()

    monkeypatch.setattr(group.backend, "kill", ask_the_other)
    with pytest.raises(ValueError):
        call_on(group, ValueError("odd"), LATE).result(None)

    assert isinstance(told[0], px.GroupBroken)
    assert "odd" in str(told[0])


def test_a_call_of_ranks_that_stayed_goes_on_in_the_next_epoch() -> None:
    group = group_of(2)
    call = call_on(group, 1, 2)

    kept = group.epoch.endpoints
    group.begin_restart()
    group.enter([*kept, *endpoints(1, first=2)])

    assert call.result(None) == [1, 2]


def test_a_call_on_a_group_that_was_closed_meanwhile_says_so() -> None:
    group = group_of(1)
    call = call_on(group, Lost("gone", intended=True))

    group.begin_close()

    with pytest.raises(px.GroupClosed, match="before update ended"):
        call.result(None)


def test_a_view_learns_from_its_call_that_the_owner_closed_the_group() -> None:
    group = group_of(1, owner=False)

    with pytest.raises(px.GroupClosed, match="by its owner"):
        call_on(group, Lost("gone", intended=True)).result(None)

    assert group.closed


CLOSED = "Connection closed by peer"


class Yielding(FakeBackend):
    """Rank 1 ends its call when it is interrupted, rank 2 once its connections are cut, rank 3 never."""

    call: Call | None = None
    said: str = CLOSED

    def cancel(self, endpoints: Sequence[Endpoint], ids: Sequence[int]) -> list[bool]:
        self._end(1, RuntimeError("interrupted"), endpoints)
        return super().cancel(endpoints, ids)

    def sever(self, endpoints: Sequence[Endpoint]) -> None:
        super().sever(endpoints)
        self._end(2, RuntimeError(self.said), endpoints)

    def _end(self, rank: int, error: Exception, among: Sequence[Endpoint]) -> None:
        if self.call is not None and rank in [endpoint.handle for endpoint in among]:
            cast(FakeArrivals, self.call.arrivals).outcomes[rank] = error


@pytest.mark.parametrize(
    ("ranks", "said", "severed", "killed", "state"),
    [
        (4, CLOSED, [2, 3], [3], State.BROKEN),
        (3, CLOSED, [2], [], State.BROKEN),  # a process group that was cut is of no use any more
        (3, "interrupted", [2], [], State.READY),  # there was none
        (2, CLOSED, [], [], State.READY),
    ],
    ids=["stop", "cut", "nothing to cut", "interrupt"],
)
def test_where_ranks_are_to_be_kept_a_failed_call_ends_on_its_peers_as_gently_as_they_let_it(
    ranks: int, said: str, severed: list[int], killed: list[int], state: State
) -> None:
    transport = Yielding()
    transport.said = said
    group = group_of(ranks, transport)
    group.spare = True
    late = [LATE] * (ranks - 1)
    transport.call = call = call_on(group, ValueError("bad batch"), *late)

    with pytest.raises(ValueError, match="bad batch") as raised:
        call.result(None)

    assert (transport.severed, transport.killed, group.lifecycle.state) == (severed, killed, state)
    assert cast(px.CallError, raised.value).victims == tuple(range(1, ranks))


def test_a_failure_seen_while_somebody_cancels_waits_for_how_that_goes() -> None:
    cancelling, go_on = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        def cancel(self, endpoints: Any, ids: Any) -> list[bool]:
            cancelling.set()
            go_on.wait(10)
            return [True] * len(endpoints)

    call = call_on(group_of(2, Slow()), 1, LATE)
    canceller = threading.Thread(target=call.cancel)
    canceller.start()
    cancelling.wait(10)
    call.arrivals.outcomes[1] = ValueError("interrupted")
    seen: list[type] = []

    def ask() -> None:
        seen.append(type(CallFuture(call).exception()))

    asker = threading.Thread(target=ask)
    asker.start()
    go_on.set()
    for thread in (canceller, asker):
        thread.join(10)

    assert seen == [px.CallCancelled]


def test_a_stream_gives_each_rank_once_and_ends_with_the_one_error() -> None:
    stream = call_on(group_of(3), 1, ValueError("odd"), 3).stream(None)
    given = []

    with pytest.raises(px.RemoteCallError):
        given.extend(stream)

    assert given == [(0, 1)]


def test_a_failed_call_and_what_it_raised_are_freed_without_the_collector() -> None:
    class Argument:
        pass

    def fail(argument: Argument) -> CallFuture[Any]:
        future: CallFuture[Any] = CallFuture(call_on(group_of(1), ValueError("odd")))
        try:
            future.result()
        except ValueError:
            return future
        raise LookupError

    gc.disable()
    try:
        argument = Argument()
        seen = weakref.ref(argument)
        future = fail(argument)
        del argument
        assert seen() is None
        assert isinstance(future.exception(), ValueError)
    finally:
        gc.enable()


def test_a_call_that_a_restart_ended_is_freed_without_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(1)
    call = call_on(group, ValueError("odd"))

    def restarted_meanwhile(timeout: float | None) -> Any:
        group.begin_restart()
        group.enter(endpoints(1, first=5))
        raise FetchFailed

    monkeypatch.setattr(call.arrivals, "fetch", restarted_meanwhile)
    gc.disable()
    try:
        with pytest.raises(px.errors.StaleEpoch):
            call.result(None)
        seen = weakref.ref(call)
        del call
        monkeypatch.undo()
        assert seen() is None
    finally:
        gc.enable()


def test_a_group_that_broke_under_a_stream_keeps_no_frames_of_whoever_streamed() -> None:
    group = group_of(2)

    with pytest.raises(px.WorkerDiedError):
        list(call_on(group, Lost("gone", "signal SIGKILL"), 1).stream(None))

    assert group.lifecycle.cause is not None
    assert group.lifecycle.cause.__traceback__ is None


def test_a_failed_rank_is_seen_beside_one_that_returned_and_one_that_is_late() -> None:
    assert call_on(group_of(3), 1, ValueError("odd"), LATE).has_failed()


class Steps(CallListener):
    """Notes all steps."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def asked(self, call: CallInfo) -> None:
        self.seen.append("asked")

    def arrived(self, call: CallInfo, rank: int | None) -> None:
        self.seen.append("arrived" if rank is None else f"arrived {rank}")

    def joined(self, call: CallInfo) -> None:
        self.seen.append("joined")

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        self.seen.append(f"ended {type(error).__name__}")


@pytest.mark.parametrize(
    ("outcomes", "ask", "steps"),
    [
        ([1, 2], lambda call: call.result(None), ["asked", "arrived", "joined", "ended NoneType"]),
        ([1, 2], lambda call: list(call.stream(None)), ["asked", "arrived 0", "arrived 1", "ended NoneType"]),
        (
            [ValueError("odd")],
            lambda call: CallFuture(call).exception(),
            ["asked", "ended RemoteCallError[ValueError]"],
        ),
    ],
    ids=["result", "stream", "failure"],
)
def test_a_listener_hears_each_step_of_a_call_once_in_order(
    outcomes: list[Any], ask: Callable[[Call], object], steps: list[str]
) -> None:
    heard, listeners = Steps(), Listeners()
    listeners.add(heard)
    call = call_on(group_of(len(outcomes)), *outcomes, listeners=listeners)

    ask(call)
    before = list(heard.seen)
    ask(call)

    assert before == steps
    assert [step for step in heard.seen if step.startswith("ended")] == steps[-1:]
