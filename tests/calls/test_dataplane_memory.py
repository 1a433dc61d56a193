"""Whose memory an argument is, and how much of the object store calls may take."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.backends.backend_types import StoreSpace
from phalanx.calls.in_flight import calls_of
from phalanx.calls.store_quota import Room

SLOW_ON_RAY = True

MB = 1 << 20
LARGE = 100_000  # numbers; far above what travels inside the message


class Writer(px.Worker):
    """Writes into what it gets."""

    @px.register(px.Dispatch.ONE_TO_ALL)
    def write_on_rank_zero(self, x: torch.Tensor) -> float:
        if self.rank == 0:
            x.fill_(-1.0)
        return float(x.sum())

    @px.register(px.Dispatch.ONE_TO_ALL)
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())

    @px.register(px.Dispatch.ONE_TO_ALL, readonly=True)
    def is_writeable(self, x: np.ndarray) -> bool:
        return x.flags.writeable

    @px.register(px.Dispatch.mesh())
    def large_output(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(1)

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @px.register(px.Dispatch.ONE_TO_ALL)
    def fail(self, x: torch.Tensor) -> None:
        raise ValueError("as asked")


BACKENDS = ["inline", pytest.param("ray", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool, Writer) as made:
        yield made


@pytest.mark.parametrize("numbers", [8, LARGE], ids=["inline", "stored"])
def test_what_one_rank_writes_neither_other_ranks_nor_the_caller_see(
    group: px.WorkerGroup, numbers: int
) -> None:
    x = torch.ones(numbers)
    assert group.write_on_rank_zero(x) == [-numbers, numbers, numbers, numbers]
    assert torch.equal(x, torch.ones(numbers))


def test_what_a_call_brought_is_freed_when_the_call_is_over(group: px.WorkerGroup) -> None:
    def remember(worker: Any, x: torch.Tensor) -> torch.Tensor:
        gc.disable()  # which would find it some day
        worker.seen = weakref.ref(x)
        return x

    def is_gone(worker: Any) -> bool:
        gc.enable()
        return worker.seen() is None

    group.run(remember, torch.ones(LARGE))
    assert group.run(is_gone) == [True] * 4


def test_a_read_only_array_cannot_be_written_to(group: px.WorkerGroup) -> None:
    assert group.is_writeable(np.ones(LARGE)) == [False] * 4


@pytest.mark.parametrize("where", BACKENDS, indirect=True)
def test_outputs_that_collect_drops_are_not_given_back(where: str) -> None:
    with (
        px.ResourcePool([4], use_gpu=False, backend=where) as pool,
        px.WorkerGroup(pool, Writer, mesh=px.Mesh(dp=2, tp=2)) as meshed,
    ):
        call = meshed.large_output.submit(torch.ones(2 * LARGE))
        call.result()
        outputs = call.call.arrivals.fetch(None)
    assert [output is None for output in outputs] == [False, True, False, True]


@pytest.mark.slow
def test_no_more_calls_are_under_way_than_allowed(ray_cluster: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_MAX_IN_FLIGHT", "3")
        with (
            px.ResourcePool([2], use_gpu=False, backend="ray") as pool,
            px.WorkerGroup(pool, Writer) as bounded,
        ):
            calls = [bounded.total.submit(torch.ones(4)) for _ in range(20)]
            most = max(sum(not one.done() for one in calls[: n + 1]) for n in range(len(calls)))
            assert most <= 3
            assert [call.result() for call in calls] == [[4.0] * 2] * 20


def test_calls_that_are_over_make_room_at_once_and_others_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_MAX_IN_FLIGHT", "3")
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, Writer) as bounded,
    ):
        for _ in range(3):
            bounded.total(torch.ones(4))
        kept = [bounded.total.submit(torch.ones(4))]
        assert len(bounded.core.recent) == 1
        for _ in range(4):
            kept.append(bounded.total.submit(torch.ones(4)))
            assert len(bounded.core.recent) == min(len(kept), 3)
        long = kept[-1].call
        monkeypatch.setattr(long.arrivals, "pending", lambda timeout=0.0: [0])  # as if it did not end
        for _ in range(4):
            kept.append(bounded.total.submit(torch.ones(4)))
            assert long in calls_of(bounded.core)
            assert len(bounded.core.recent) <= 3


class Store:
    """A transport of which only the store is looked at."""

    def __init__(self, capacity: int, free: int) -> None:
        self.capacity, self.free = capacity, free

    def store(self) -> StoreSpace:
        return StoreSpace(self.capacity, self.free)


def room(store: Any) -> Room:
    return Room(store)


def test_what_does_not_fit_now_waits_for_the_calls_under_way() -> None:
    store = Store(256 * MB, 10 * MB)
    waits: list[float] = []

    def one_ends(seconds: float) -> bool:
        waits.append(seconds)
        store.free += 60 * MB
        return True

    room(store).admit(150 * MB, 150 * MB, wait=one_ends)
    assert len(waits) == 3


def test_with_nothing_under_way_it_fails_also_for_what_was_stored_a_moment_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.calls.store_quota._FREED_WITHIN_S", 0.1)
    monkeypatch.setattr("phalanx.calls.store_quota._REPORTED_WITHIN_S", 60.0)
    with pytest.raises(px.DispatchError, match=r"10\.0 MiB of 256\.0 MiB are free"):
        room(Store(256 * MB, 10 * MB)).admit(150 * MB, 150 * MB, wait=lambda seconds: False)
    made = room(Store(256 * MB, 256 * MB))
    made.took(150 * MB)
    with pytest.raises(px.DispatchError, match="no call is under way"):
        made.admit(150 * MB, 150 * MB, wait=lambda seconds: False)


@pytest.mark.parametrize("argument", ["broadcast", "split"])
def test_nothing_of_a_call_that_does_not_fit_is_sent(
    group: px.WorkerGroup, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group.core.backend, "store", lambda: StoreSpace(MB, MB))
    monkeypatch.setattr(group.core.room, "unchecked", 0, raising=False)
    before = group.statistics()
    call = group.total if argument == "broadcast" else group.rows
    with pytest.raises(px.DispatchError, match="Nothing was sent"):
        call(torch.ones(MB))
    assert group.statistics() == before


@pytest.mark.slow
def test_300_steps_with_failures_among_them_leave_the_store_where_it_was(ray_cluster: Any) -> None:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as made, px.WorkerGroup(made, Writer) as steps:
        batch = torch.ones(MB // 4)
        transport = steps.core.backend
        steps.rows(batch)
        before = _settled(transport)
        for step in range(300):
            if step % 10 == 0:
                with pytest.raises(ValueError, match="as asked"):
                    steps.fail(batch)
            elif step % 10 == 1:
                steps.rows.submit(batch)  # nobody asks for the result
            else:
                steps.rows(batch)
        steps.total(torch.ones(1))
        assert before - _settled(transport) < 8 * MB


def _settled(transport: Any) -> int:
    """Free bytes once what was dropped is reported: unchanged for half a second, at most 20 s."""
    pause, deadline = threading.Event(), time.monotonic() + 20
    free = transport.store().free
    while not pause.wait(0.5) and time.monotonic() < deadline:
        now = transport.store().free
        if now == free:
            break
        free = now
    return free
