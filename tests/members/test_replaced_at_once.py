"""Threads replace ranks of several targets of one sync concurrently. All targets get weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import pytest

import phalanx as px
from phalanx.backends.backend_types import Endpoint, SpawnRequest
from phalanx.backends.inline import InlineBackend
from phalanx.testing import faults
from tests.support.fault_workers import lose
from tests.weights.weight_workers import NAME, Actor, Loading, Rollout, same

SLOW_ON_RAY = True
_PATIENCE_S = 60.0


class Calling(Loading):
    """Calls a function of the test in the middle of a load."""

    amid: ClassVar[list[Callable[[], None]]] = []

    def loaded(self) -> None:
        if self.amid:
            self.amid.pop()()


class Gate:
    """Delays process starts on other threads than the test's own until ``go`` is set."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def spawn(self, transport: InlineBackend, request: SpawnRequest) -> list[Endpoint]:
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            if not self.go.wait(_PATIENCE_S):
                raise TimeoutError("the test did not go on")
        return _SPAWN(transport, request)


_SPAWN = InlineBackend.spawn


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(InlineBackend, "spawn", lambda transport, request: made.spawn(transport, request))
    return made


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        Calling.amid.clear()
        yield made


def replaced(threads: ThreadPoolExecutor, group: px.WorkerGroup) -> Future[tuple[int, ...]]:
    return threads.submit(px.replace_ranks, group, [1], state="none")


def whole(group: px.WorkerGroup, actor: px.WorkerGroup) -> bool:
    """Return whether all ranks have the weights of the source. Raises if a rank has none."""
    return all(same(one, actor.values()[0]) for one in group.values())


def unsynced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "did not receive weights" in one.getMessage()]


def test_concurrently_replaced_ranks_of_two_targets_have_weights(
    backend: str, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with px.ResourcePool([2], use_gpu=False) as pool:
        actor, first, second = (
            px.WorkerGroup(pool[:n], of) for n, of in ((1, Actor), (2, Rollout), (2, Rollout))
        )
        with px.WeightSync(actor, [first, second], NAME) as sync:
            actor.train()
            before = sync().number
            both = threading.Barrier(2)

            def at_once(group: px.WorkerGroup) -> tuple[int, ...]:
                faults.kill(group, 1)
                both.wait(_PATIENCE_S)
                return px.replace_ranks(group, 1, state="none")

            with caplog.at_level(logging.WARNING, "phalanx"):
                found = list(threads.map(at_once, [first, second], timeout=2 * _PATIENCE_S))

            assert found == [(1,), (1,)]
            assert unsynced(caplog) == []
            assert whole(first, actor) and whole(second, actor)
            assert min(*first.version(), *second.version()) > before
            actor.train()
            newest = sync().number
            assert set(first.version()) == set(second.version()) == {newest}
            assert whole(first, actor) and whole(second, actor)


def test_a_target_that_is_still_being_replaced_does_not_delay_weights_of_another_target(
    here: px.ResourcePool, threads: ThreadPoolExecutor, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    actor, engines = px.WorkerGroup(here[0:1], Actor), px.WorkerGroup(here, Rollout)
    slow = px.WorkerGroup(here, Rollout)
    with px.WeightSync(actor, [slow, engines], NAME) as sync:
        sync()
        later = replaced(threads, slow)
        assert gate.begun.wait(_PATIENCE_S)

        px.replace_ranks(engines, [1], state="none")

        assert whole(engines, actor)
        gate.go.set()
        assert later.result(_PATIENCE_S) == (1,)
        assert whole(slow, actor)
    assert unsynced(caplog) == []


def test_a_target_replaced_during_a_sync_is_left_out_when_the_sync_is_repeated(
    here: px.ResourcePool, threads: ThreadPoolExecutor, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    actor, engines = px.WorkerGroup(here[0:1], Actor), px.WorkerGroup(here, Calling)
    other = px.WorkerGroup(here, Rollout)
    with px.WeightSync(actor, [engines, other], NAME) as sync:
        sync()
        begun: list[Future[tuple[int, ...]]] = []

        def replace_other() -> None:
            begun.append(replaced(threads, other))
            assert gate.begun.wait(_PATIENCE_S)

        Calling.amid.append(replace_other)

        px.replace_ranks(engines, [1], state="none")

        assert whole(engines, actor)
        gate.go.set()
        assert begun[0].result(_PATIENCE_S) == (1,)
        assert whole(other, actor)
        assert whole(engines, actor)
    assert unsynced(caplog) == []


def test_calls_of_remaining_ranks_continue_while_other_ranks_are_replaced(
    here: px.ResourcePool, threads: ThreadPoolExecutor, gate: Gate
) -> None:
    group = px.WorkerGroup(here, Calling)
    staying, going = group[0].values.submit(), group[1].values.submit()
    later = replaced(threads, group)
    assert gate.begun.wait(_PATIENCE_S)

    found = staying.result()
    with pytest.raises(px.errors.StaleEpoch):
        going.result()

    gate.go.set()
    assert later.result(_PATIENCE_S) == (1,)
    assert same(found, group.values()[0])


@pytest.mark.parametrize("how", ["closed", "broken"])
def test_a_closed_or_broken_target_keeps_no_weights_from_another_target(
    here: px.ResourcePool, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    actor, engines = px.WorkerGroup(here[0:1], Actor), px.WorkerGroup(here, Rollout)
    other = px.WorkerGroup(here, Rollout)
    with px.WeightSync(actor, [other, engines], NAME) as sync:
        sync()
        if how == "closed":
            other.close()
        else:
            lose(other, 0, call=other.values)

        px.replace_ranks(engines, [1], state="none")

        assert whole(engines, actor)
    assert unsynced(caplog) == []
