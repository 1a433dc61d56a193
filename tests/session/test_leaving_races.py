"""One thread leaves a cluster, in order or abruptly, while other threads call, close or restart a group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import phalanx as px
from phalanx.session.session import session
from phalanx.testing.scripted import Event, ScriptedBackend, scripted
from tests.support.fault_workers import Trouble, within


class Stage:
    """A group whose script waits at a step until ``go_on`` is set, and threads that use the group."""

    def __init__(self, transport: ScriptedBackend, threads: ThreadPoolExecutor) -> None:
        self.backend = transport
        self.threads = threads
        self.stop_at = ""
        self.there, self.go_on = threading.Event(), threading.Event()
        self.group: Any = None

    def script(self, what: str, number: int) -> Event:
        if what == self.stop_at:
            self.stop_at = ""
            self.there.set()
            self.go_on.wait(30.0)
        return "fine"

    def leave(self, how: str) -> None:
        if how == "without a word":
            self.backend.connected = lambda: False  # pyright: ignore
            session.lost(self.backend)
        else:
            session._let_go(self.backend)

    def between(self, work: Callable[[], Any], stop_at: str, how: str) -> Future[Any]:
        """Leave the cluster while ``work`` is at a step of the script; return the future of the work."""
        self.stop_at = stop_at
        done = self.threads.submit(work)
        assert self.there.wait(30.0)
        leaving = self.threads.submit(self.leave, how)
        assert within(30.0, lambda: self.group.closed)
        self.go_on.set()
        leaving.result(30.0)
        return done


@pytest.fixture
def stage() -> Iterator[Stage]:
    with (
        ThreadPoolExecutor(6) as threads,
        scripted(lambda what, number: made.script(what, number)) as transport,
    ):
        made = Stage(transport, threads)
        made.group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False, backend="inline"), Trouble)
        yield made
        made.go_on.set()


WAYS = pytest.mark.parametrize("how", ["in order", "without a word"])


@WAYS
def test_a_call_sent_while_the_cluster_is_left_returns_or_raises_group_closed(stage: Stage, how: str) -> None:
    error = stage.between(stage.group.ping, "call", how).exception(30.0)

    assert error is None or isinstance(error, px.GroupClosed)
    assert stage.group.state == "closed"


@WAYS
def test_a_restart_while_the_cluster_is_left_raises_group_closed_and_leaves_no_process(
    stage: Stage, how: str
) -> None:
    error = stage.between(stage.group.restart, "spawn", how).exception(30.0)

    assert isinstance(error, px.GroupClosed)
    assert stage.group.state == "closed"
    endpoints = stage.group.core.endpoints
    assert len(stage.backend.dead_of(endpoints)) == len(endpoints)


@WAYS
def test_concurrent_calls_raise_group_closed_and_concurrent_closes_return(stage: Stage, how: str) -> None:
    start = threading.Barrier(3)

    def at_once(work: Callable[..., None], *args: Any) -> None:
        start.wait(30.0)
        work(*args)

    def call() -> BaseException:
        while True:
            try:
                assert stage.group.ping() == [0, 1]
            except BaseException as error:
                return error

    calling = [stage.threads.submit(call) for _ in range(3)]
    works = [(stage.leave, how), (stage.group.close,), (stage.group.pool.close,)]
    for done in [stage.threads.submit(at_once, *work) for work in works]:
        done.result(30.0)

    assert {type(done.result(30.0)) for done in calling} == {px.GroupClosed}
    assert (stage.group.state, stage.group.pool.closed) == ("closed", True)
