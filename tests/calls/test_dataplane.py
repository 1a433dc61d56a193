"""Data movement: counted bytes, owned memory, resharding by reference, and capacity of the object store."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.backends.backend_types import StoreSpace
from phalanx.calls.in_flight import calls_of
from phalanx.calls.values import StoreQuota
from phalanx.wire.unpack import received

SLOW_ON_RAY = True

MB = 1 << 20
ROW = 4096  # bytes of a row of 1024 float32


def _is_mapped(address: int) -> bool:
    """Whether an address lies in a shared mapping of this process (proc(5), maps)."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions, *_ = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= address < end:
                return permissions.endswith("s")
    return False


class Mover(px.Worker):
    """Makes rows, passes them on, and says how many bytes its process has decoded."""

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def make(self, wanted: torch.Tensor) -> torch.Tensor:
        return wanted.to(torch.float32)[:, None].repeat(1, 1024)

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def pass_on(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def first_column(self, rows: torch.Tensor) -> list[float]:
        return rows[:, 0].tolist()

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, readonly=True)
    def look(self, rows: torch.Tensor) -> tuple[float, bool]:
        """Return the sum of the rows, and whether they are in shared memory."""
        return float(rows.sum()), _is_mapped(rows.data_ptr())

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def sum_beside(self, rows: Any, table: Any) -> float:
        return float(table[0].sum())

    @px.register(px.Dispatch.ONE_TO_ALL)
    def received(self) -> int:
        return received.nbytes

    @px.register(px.Dispatch.ONE_TO_ALL)
    def ping(self) -> int:
        return self.rank

    @px.register(px.Dispatch.ONE_TO_ALL)
    def total(self, x: torch.Tensor) -> float:
        return float(x.sum())

    @px.register(px.Dispatch.ONE_TO_ALL, readonly=True)
    def is_writeable(self, x: np.ndarray) -> bool:
        return x.flags.writeable

    @px.register(px.Dispatch.mesh())
    def large_output(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(1)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def fail(self, x: torch.Tensor) -> None:
        raise ValueError("as asked")

    @px.register(px.Dispatch.ONE_TO_ALL)
    def blob(self, nbytes: int) -> bytes:
        return bytes(nbytes)


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool, Mover)


def grown(group: px.WorkerGroup, before: dict[str, int], name: str) -> int:
    return group.statistics()[name] - before[name]


def test_small_arguments_are_sent_and_large_ones_are_stored_once_for_all_ranks(group: px.WorkerGroup) -> None:
    before = group.statistics()
    group.ping()
    assert grown(group, before, "sent_bytes") == 0
    group.total(torch.ones(8))
    assert grown(group, before, "sent_bytes") > 0
    assert grown(group, before, "stored_bytes") == 0
    group.total(torch.ones(MB))
    assert 4 * MB <= grown(group, before, "stored_bytes") < 4.1 * MB


class Weights(torch.Tensor):
    """A type of tensor."""


class Rebuilt:
    """Consists of other arrays each time it is pickled."""

    def __getstate__(self) -> Any:
        return {"rows": np.ones(MB // 4, np.float32)}


def in_module(table: torch.Tensor) -> Any:
    module = torch.nn.Linear(MB // 8, 2, bias=False)
    module.weight = torch.nn.Parameter(table.view(2, -1))
    return module


#: Functions that put a tensor into another value, and the number of MiB that are stored with it.
HOLDERS: dict[str, tuple[Any, int]] = {
    "tensor": (lambda table: table, 1),
    "array": (lambda table: table.numpy(), 2),
    "object": (lambda table: UserDict(x=table), 1),
    "closure": (lambda table: lambda: table, 1),
    "module": (in_module, 2),
    "subclass": (lambda table: table.as_subclass(Weights), 2),
    "sparse": (lambda table: table.to_sparse(), 4),  # with indices of 8 bytes
    "rebuilt": (lambda table: Rebuilt(), 5),  # in the message of each of the 4 ranks
}


@pytest.mark.parametrize(("make", "stored"), HOLDERS.values(), ids=list(HOLDERS))
def test_a_large_value_in_arguments_of_several_ranks_is_stored_once(
    group: px.WorkerGroup, make: Any, stored: int
) -> None:
    table = torch.ones(MB // 4)
    before = group.statistics()

    sums = group.sum_beside(
        {"rows": torch.ones(8, 2), "table": px.replicate(make(table))}, px.replicate([table])
    )

    assert sums == [MB // 4] * 4
    assert stored * MB <= grown(group, before, "stored_bytes") < (stored + 0.1) * MB


def test_statistics_count_calls_and_fetched_and_stored_bytes(group: px.WorkerGroup, backend: str) -> None:
    before = px.debug.statistics()
    px.put(torch.ones(MB), backend=backend)
    assert px.debug.statistics()["stored_bytes"] - before["stored_bytes"] >= 4 * MB
    fetched = group.statistics()
    group.pass_on(torch.zeros(256, 1024))
    assert MB <= grown(group, fetched, "fetched_bytes") < 1.1 * MB
    fetched = group.statistics()
    group.blob(1000)
    assert grown(group, fetched, "fetched_bytes") == 4000
    assert px.debug.statistics()["calls"] == before["calls"] + 2


def test_rows_of_a_chain_of_calls_bypass_the_driver(two: px.ResourcePool) -> None:
    a, b, c = (px.WorkerGroup(two, Mover) for _ in range(3))
    made = a.make.submit(torch.arange(1024))
    columns = c.first_column(b.pass_on.submit(made))
    fetched = [one.statistics()["fetched_bytes"] for one in (a, b, c)]
    assert [value for column in columns for value in column] == [float(i + 1) for i in range(1024)]
    assert fetched[:2] == [0, 0]
    assert fetched[2] < 32 * 1024  # c's own answer: 1024 numbers as lists, not 4 MB of rows


@pytest.fixture(scope="module")
def of_size(ray_cluster: Any) -> Iterator[dict[int, px.WorkerGroup]]:
    """Groups of two and of three ranks. On Ray only: inline ranks share one process and its meter."""
    with px.ResourcePool([3], use_gpu=False, backend="ray") as made:
        yield {size: px.WorkerGroup(made[:size], Mover) for size in (2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(("sources", "targets"), [(3, 2), (2, 3)])
def test_resharding_on_one_node_fetches_at_most_the_shard_of_each_rank(
    of_size: dict[int, px.WorkerGroup], sources: int, targets: int
) -> None:
    rows, target = 257, of_size[targets]
    made = of_size[sources].make.submit(torch.arange(rows))
    made.result()
    before = target.received()
    columns = target.first_column(made)
    fetched = [now - then for now, then in zip(target.received(), before, strict=True)]
    share = -(-rows // targets) * ROW
    assert [value for column in columns for value in column] == [float(i) for i in range(rows)]
    assert max(fetched) <= share + 8192  # headers, and metadata of each part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "targets", "in_place"), [(3, 3, [True] * 3), (2, 3, [True, False, True])]
)
def test_readonly_rows_are_read_in_shared_memory_unless_they_are_joined(
    of_size: dict[int, px.WorkerGroup], sources: int, targets: int, in_place: list[bool]
) -> None:
    seen = of_size[targets].look(of_size[sources].make.submit(torch.arange(1020)))
    assert sum(total for total, _ in seen) == 1024 * sum(range(1020))
    assert [shared for _, shared in seen] == in_place  # rows of two outputs are joined


@pytest.mark.slow
def test_ranks_of_a_class_without_torch_do_not_import_it(ray_cluster: Any) -> None:
    class Plain:  # local, so that it is pickled by value: its module imports torch
        def __init__(self) -> None:
            self.torch_at_start = "torch" in sys.modules

        @px.register(px.Dispatch.ONE_TO_ALL)
        def facts(self) -> tuple[bool, bool]:
            return self.torch_at_start, "torch" in sys.modules

    with px.ResourcePool([2], use_gpu=False, backend="ray") as made, px.WorkerGroup(made, Plain) as plain:
        assert plain.facts() == [(False, False)] * 2


LARGE = 100_000  # numbers; too large to travel inside the message


def test_the_argument_of_a_call_is_freed_after_the_call(group: px.WorkerGroup) -> None:
    def remember(worker: Any, x: torch.Tensor) -> torch.Tensor:
        gc.disable()  # which would free it later
        worker.seen = weakref.ref(x)
        return x

    def is_gone(worker: Any) -> bool:
        gc.enable()
        return worker.seen() is None

    group.run(remember, torch.ones(LARGE))
    assert group.run(is_gone) == [True] * 4


@pytest.mark.parametrize("mark", [lambda x: x, lambda x: px.readonly(px.readonly(x))])
def test_an_array_for_a_readonly_method_is_not_writable(group: px.WorkerGroup, mark: Any) -> None:
    assert group.is_writeable(mark(np.ones(LARGE))) == [False] * 4


def test_outputs_that_collect_drops_are_not_returned(four: px.ResourcePool) -> None:
    meshed = px.WorkerGroup(four, Mover, mesh=px.Mesh(dp=2, tp=2))
    call = meshed.large_output.submit(torch.ones(2 * LARGE))
    call.result()
    outputs = call.call.arrivals.fetch(None)
    assert [output is None for output in outputs] == [False, True, False, True]


@pytest.mark.slow
def test_calls_in_flight_stay_within_the_limit(
    of_size: dict[int, px.WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_MAX_IN_FLIGHT", "3")
    with px.WorkerGroup(of_size[2].pool, Mover) as bounded:
        calls = [bounded.total.submit(torch.ones(4)) for _ in range(20)]
        most = max(sum(not one.done() for one in calls[: n + 1]) for n in range(len(calls)))
        assert most <= 3
        assert [call.result() for call in calls] == [[4.0] * 2] * 20


def test_finished_calls_leave_the_in_flight_limit_and_a_running_call_stays(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_MAX_IN_FLIGHT", "3")
    with px.WorkerGroup(here[:1], Mover) as bounded:
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
    """A backend with nothing but an object store."""

    def __init__(self, capacity: int, free: int) -> None:
        self.capacity, self.free = capacity, free

    def store(self) -> StoreSpace:
        return StoreSpace(self.capacity, self.free)


def test_a_value_that_does_not_fit_waits_for_calls_in_flight() -> None:
    store = Store(256 * MB, 10 * MB)
    looks: list[int] = []

    def one_ends() -> bool:
        looks.append(store.free)
        store.free += 60 * MB
        return True

    StoreQuota(store).admit([150 * MB], is_busy=one_ends)
    assert len(looks) == 3


def test_a_value_that_does_not_fit_is_refused_without_calls_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phalanx.calls.values._FREED_WITHIN_S", 0.1)
    monkeypatch.setattr("phalanx.calls.values._REPORTED_WITHIN_S", 60.0)
    with pytest.raises(px.DispatchError, match=r"10\.0 MiB of 256\.0 MiB are free"):
        StoreQuota(Store(256 * MB, 10 * MB)).admit([150 * MB], is_busy=lambda: False)
    made = StoreQuota(Store(256 * MB, 256 * MB))
    made.took(150 * MB)
    with pytest.raises(px.DispatchError, match="no call in flight"):
        made.admit([150 * MB], is_busy=lambda: False)


@pytest.mark.parametrize("mark", [lambda value: value, px.readonly], ids=["private", "readonly"])
@pytest.mark.parametrize("argument", ["broadcast", "split"])
def test_a_call_that_does_not_fit_into_the_store_sends_nothing(
    group: px.WorkerGroup, argument: str, mark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group.core.backend, "store", lambda: StoreSpace(MB, MB))
    monkeypatch.setattr(group.core.room, "unchecked", 0, raising=False)
    before = group.statistics()
    call = group.total if argument == "broadcast" else group.pass_on
    with pytest.raises(px.DispatchError, match="Nothing was sent"):
        call(mark(torch.ones(MB)))
    assert group.statistics() == before


@pytest.mark.slow
def test_300_steps_with_failures_leave_the_free_store_unchanged(ray_cluster: Any) -> None:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as made, px.WorkerGroup(made, Mover) as steps:
        batch = torch.ones(MB // 4)
        transport = steps.core.backend
        steps.pass_on(batch)
        before = _settled(transport)
        for step in range(300):
            if step % 10 == 0:
                with pytest.raises(ValueError, match="as asked"):
                    steps.fail(batch)
            elif step % 10 == 1:
                steps.pass_on.submit(batch)  # the result is not read
            else:
                steps.pass_on(batch)
        steps.total(torch.ones(1))
        assert before - _settled(transport) < 8 * MB


def _settled(transport: Any) -> int:
    """Return the free bytes once they are unchanged for half a second, after 20 s at most."""
    pause, deadline = threading.Event(), time.monotonic() + 20
    free = transport.store().free
    while not pause.wait(0.5) and time.monotonic() < deadline:
        now = transport.store().free
        if now == free:
            break
        free = now
    return free
