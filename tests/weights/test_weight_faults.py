"""Ranks that die, stop or hang during a sync, and resources that syncs leave."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.weights import buckets, weight_ends
from tests.support.fault_workers import taking_less_than, within
from tests.weights.weight_workers import NAME

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_cluster")]
ROWS = 64
Both = tuple[px.WorkerGroup, px.WorkerGroup]


class Peer(px.Worker):
    """Publishes a tensor by rows and accepts another complete tensor, in many buckets."""

    def __init__(self) -> None:
        size = ROWS // self.world_size
        begin = self.rank * size
        self.own = {"w": torch.arange(size * 1024, dtype=torch.float32).reshape(size, 1024) + begin}
        self.other = {"w": torch.zeros(ROWS, 1024)}
        boxes = {"w": px.weights.ShardSpec((ROWS, 1024), (((begin, 0), (size, 1024)),))}
        self.publish_weights(NAME, self.own, boxes=boxes)
        self.accept_weights("other", self.other)

    @px.register
    def train(self) -> None:
        self.own["w"] += 1

    @px.register(needs_weights=False)
    def own_rows(self) -> torch.Tensor:
        return self.own["w"]

    @px.register
    def arrived(self) -> torch.Tensor:
        return self.other["w"]

    @px.register
    def reduce(self) -> float:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    @px.register(needs_weights=False)
    def stall(self, name: str, after: int, path: str) -> None:
        """Let a function of buckets create a file and hang after ``after`` calls."""
        calls = itertools.count()

        def stalled(*given: Any) -> Any:
            if next(calls) >= after:
                Path(path).touch()
                time.sleep(120)
            return getattr(buckets, name)(*given)

        setattr(weight_ends, name, stalled)


@pytest.fixture(scope="module")
def peers(ray_cluster: None) -> Iterator[Both]:
    with px.ResourcePool([4], use_gpu=False) as pool:
        yield px.WorkerGroup(pool[0:2], Peer), px.WorkerGroup(pool[2:4], Peer)


@pytest.fixture
def both(peers: Both) -> Both:
    for group in peers:
        if group.state != "ready":
            group.restart()
    return peers


def syncing(source: px.WorkerGroup, target: px.WorkerGroup, **options: Any) -> px.WeightSync:
    return px.WeightSync(source, target, "other", source_name=NAME, **options)


@pytest.fixture(params=["shared memory", "gloo"])
def sync(both: Both, request: pytest.FixtureRequest) -> Iterator[px.WeightSync]:
    with syncing(*both, bucket_bytes=4096, timeout=60, transport=request.param) as made:
        made()
        both[0].train()
        yield made


def arrived_whole(both: Both) -> bool:
    wanted = torch.cat(both[0].own_rows())
    return all(torch.equal(one, wanted) for one in both[1].arrived())


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_rank_killed_during_a_sync_is_named_within_2_s_and_the_next_sync_repairs_weights(
    sync: px.WeightSync, both: Both, tmp_path: Path, side: str
) -> None:
    source, target = both
    struck, rank, *slow = (source, 1, "read_slot", 8) if side == "source" else (target, 0, "write_slot", 2)
    victim, flag = struck[rank].run(lambda _: os.getpid()), tmp_path / "stalled"
    struck[rank].stall(*slow, str(flag))
    future = sync.submit()
    assert within(20, flag.exists)

    os.kill(victim, signal.SIGKILL)
    with taking_less_than(2.0), pytest.raises(px.WorkerDiedError, match=f"rank {rank}") as raised:
        future.result(30)

    assert raised.value.group == struck.name
    if side == "source":
        assert {one.status for one in px.weights.status(target, "other").values()} == {"torn"}
    else:
        assert source.state == "ready"
    struck.restart()
    with pytest.raises(px.weights.WeightsTorn, match=None if side == "source" else "restarted after"):
        target.arrived()
    assert sync().number > 2
    assert arrived_whole(both)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_a_target_that_fails_before_it_connects_does_not_delay_its_source(both: Both, transport: Any) -> None:
    source, target = both
    with syncing(source, target, transport=transport) as sync:
        sync.explain()  # plans
        target[0].run(lambda worker: worker.other.update(w=torch.zeros(ROWS, 8)))

        with taking_less_than(20.0), pytest.raises(px.weights.WeightsMismatch, match="do not match the plan"):
            sync()

        assert source.state == "ready"
        with taking_less_than(5.0):
            source.train()
        target[0].run(lambda worker: worker.other.update(w=torch.zeros(ROWS, 1024)))
        sync()
    assert arrived_whole(both)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_stopped_rank_is_named_by_an_error_after_the_timeout(both: Both, side: str, transport: Any) -> None:
    source, target = both
    with syncing(source, target, bucket_bytes=4096, timeout=1.0, transport=transport) as sync:
        sync()
        victim = (source if side == "source" else target)[0].run(lambda _: os.getpid())
        os.kill(victim, signal.SIGSTOP)
        try:
            # Over gloo, a rank that waits for a late rank is late at the same time.
            late = "(source|target) rank 0" if transport == "gloo" else f"{side} rank 0"
            with pytest.raises(px.weights.WeightsTransferError, match=late):
                sync.submit().result(60)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was stopped for too long and killed
                os.kill(victim, signal.SIGCONT)
        for group in both:
            if group.state != "ready":
                group.restart()
        source.train()
        sync()

    assert arrived_whole(both)


def test_crosswise_syncs_and_collectives_of_users_do_not_deadlock(both: Both) -> None:
    one, other = both
    there = syncing(one, other)
    back = syncing(other, one)
    threads = ThreadPoolExecutor(4)

    def often(*work: Callable[[], object]) -> list[object]:
        return [step() for _ in range(8) for step in work]

    works = [(one.train, there), (other.train, back), (one.reduce, other.reduce), (other.reduce, one.reduce)]
    futures = [threads.submit(often, *work) for work in works]
    done = [future.result(120) for future in futures]

    assert done[2:] == [[[2.0, 2.0]] * 16] * 2
    there.close()
    back.close()


def open_files(group: px.WorkerGroup) -> list[int]:
    return group.run(lambda _: len(os.listdir("/proc/self/fd")))


def segments(group: px.WorkerGroup) -> list[int]:
    """Return the number of mapped segments in each rank."""
    return group.run(lambda _: Path("/proc/self/maps").read_text().count("memfd:phalanx-weights"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("restarts", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_file_descriptors_and_segments_do_not_grow_over_50_syncs_and_restarts(
    both: Both, restarts: int
) -> None:
    source, target = both
    with syncing(source, target) as sync:
        for _ in range(2):
            source.train()
            sync()
        before = open_files(source), open_files(target), segments(source), segments(target)
        for _ in range(50):
            source.train()
            sync()
        assert (open_files(source), open_files(target), segments(source), segments(target)) == before
        for _ in range(restarts):
            target.restart()
            source.train()
            sync()
        assert (open_files(source), segments(source), segments(target)) == (before[0], *before[2:])
        assert all(all(counts) for counts in before)
    assert within(5, lambda: segments(source) == segments(target) == [0, 0])


def test_a_source_frees_its_segments_after_its_target_is_closed(both: Both) -> None:
    source, _ = both
    with px.ResourcePool([1], use_gpu=False) as apart:
        target = px.WorkerGroup(apart, Peer)
        sync = syncing(source, target)
        sync()
        assert all(segments(source))
        target.close()
        with pytest.raises(px.GroupClosed):
            sync()
    assert within(5, lambda: segments(source) == [0, 0])


def test_torn_weights_stop_calls_of_other_drivers(both: Both) -> None:
    def ask(_: Peer, view: px.WorkerGroup) -> int:
        return len(view.arrived())

    source, target = both
    with syncing(source, target) as sync:
        sync()
        assert source.run(ask, target) == [2, 2]
        target.restart()

        with pytest.raises(px.weights.WeightsTorn):
            source.run(ask, target)
