"""Several threads on one group: calls that are composed, waited for or cancelled while the group changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import NoneType
from typing import Any

import pytest

import phalanx as px
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.members import processes, recovery
from phalanx.testing.scripted import scripted


class Counter(px.Worker):
    """A worker that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    @px.register
    def add(self, value: Any) -> int:
        self.calls += 1
        return self.calls

    @px.register
    def count(self) -> int:
        return self.calls

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def rows(self, values: list[Any]) -> list[Any]:
        self.calls += 1
        return values


class WhilePickled:
    """A value whose pickling waits for another thread that does ``work``."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def __reduce__(self) -> Any:
        thread = threading.Thread(target=self._work)
        thread.start()
        thread.join(20)
        return int, (7,)


@pytest.fixture
def group(here: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(here, Counter)


@pytest.mark.parametrize("call", [lambda group, x: group.add(x), lambda group, x: group.rows([1, 2, x])])
def test_a_call_that_is_composed_during_a_restart_or_close_is_refused(group: Any, call: Any) -> None:
    with pytest.raises(px.errors.StaleEpoch):
        call(group, WhilePickled(group.restart))
    assert group.count() == [0, 0, 0]
    with pytest.raises(px.GroupClosed):
        call(group, WhilePickled(group.close))


def test_a_call_that_waits_for_capacity_during_a_restart_is_refused(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = group.core
    in_flight = group.count.submit()
    monkeypatch.setattr(core, "max_in_flight", 1)
    monkeypatch.setattr(recovery, "make_room", Group.begin_restart)

    with pytest.raises(px.GroupBroken, match="is being restarted"):
        group.add(1)
    del in_flight


def test_a_concurrent_cancel_and_close_leave_a_closed_group_and_an_error() -> None:
    with (
        scripted(lambda what, number: "hang" if (what, number) == ("call", 1) else "fine"),
        px.ResourcePool([3], use_gpu=False, backend="inline") as pool,
    ):
        group = px.WorkerGroup(pool, Counter)
        call = group.add.submit(1)
        with ThreadPoolExecutor() as threads:
            ended = [threads.submit(work) for work in (call.cancel, group.close)]
        for each in ended:
            assert isinstance(each.exception(), (px.PhalanxError, NoneType))

        assert isinstance(call.exception(), (px.CallCancelled, px.GroupClosed, px.WorkerDiedError))
        assert group.state == State.CLOSED.value


@pytest.mark.parametrize("seed", range(20))
def test_restarts_calls_and_cancels_of_three_threads_end_in_results_or_library_errors(seed: int) -> None:
    odd: list[BaseException] = []

    def often(work: Callable[[], object]) -> None:
        for _ in range(4):
            try:
                work()
            except px.errors.InternalError as error:
                odd.append(error)
            except px.PhalanxError:
                pass
            except BaseException as error:
                odd.append(error)

    def event(what: str, number: int) -> Any:
        return "slow" if what == "call" and (number * 7 + seed) % 5 == 0 else "fine"

    with scripted(event), px.ResourcePool([2], use_gpu=False, backend="inline") as pool:
        group = px.WorkerGroup(pool, Counter)
        works = (group.restart, lambda: group.add(1), lambda: group.add.submit(1).cancel())
        with ThreadPoolExecutor() as threads:
            threads.map(often, works)
        group.close()

    assert not odd


def test_an_interrupt_while_workers_close_leaves_no_process(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    endpoints = group.core.endpoints
    monkeypatch.setattr(processes, "close_workers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.close()

    assert group.state == "closed"
    assert group.core.backend.dead_of(endpoints) == [0, 1, 2]


def test_a_group_that_breaks_while_ranks_are_replaced_does_not_become_ready(group: Any) -> None:
    core = group.core
    core.begin_restart(gone=[1])
    core.broken(px.CallTimeout("late", group="g", method="m", timeout=1.0))

    with pytest.raises(px.CallTimeout, match="late"):
        core.started()
