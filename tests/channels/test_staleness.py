"""Leases on rows between a trainer and generating ranks, on each backend."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.channels.staleness_state import ReadyRows
from phalanx.testing import faults
from tests.support.fault_workers import within

WITHIN = 30.0


class Generator(px.Worker):
    @px.register
    def generate(self, staleness: px.StalenessManager, channel: px.Channel, rows: int, width: int = 1) -> int:
        with staleness.lease(rows, WITHIN) as lease:
            return lease.put(channel, {"x": torch.full((rows, width), float(self.rank))}, lease.version)


@pytest.fixture
def group(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool[0:2], Generator, name="generators") as made:
        yield made


@pytest.fixture
def staleness(backend: str) -> px.StalenessManager:
    return px.StalenessManager(max_lag=1, rows_per_version=4)


def test_generated_rows_that_the_trainer_takes_count_as_trained(
    group: px.WorkerGroup, staleness: px.StalenessManager
) -> None:
    with px.Channel() as channel:
        assert group.generate(staleness, channel, 2) == [2, 2]
        with channel.take_rows(4, WITHIN) as batch:
            assert batch.rows == 4
        staleness.advance(1)
    assert (staleness.stats.rows.trained, staleness.stats.lags) == (4, {0: 4})


def test_an_event_loop_leases_puts_and_takes_rows(staleness: px.StalenessManager) -> None:
    async def generate_and_take(channel: px.Channel) -> tuple[int, Any]:
        with await staleness.lease_async(4, WITHIN) as lease:
            accepted = await lease.put_async(channel, {"x": torch.arange(4)}, lease.version, WITHIN)
        with await channel.take_rows_async(4, WITHIN) as batch:
            return accepted, batch.value()["x"].tolist()

    with px.Channel() as channel:
        assert asyncio.run(generate_and_take(channel)) == (4, [0, 1, 2, 3])
    staleness.advance(1)
    assert staleness.stats.rows.trained == 4


def test_rows_of_a_failed_block_or_put_are_dropped_with_their_reason(staleness: px.StalenessManager) -> None:
    with pytest.raises(KeyError), staleness.lease(3) as lease:
        assert lease.accept(1, lease.version) == (0,)
        raise KeyError("filtered")
    with px.Channel(1) as channel, staleness.lease(2) as lease:
        channel.put("first")
        with pytest.raises(px.channels.ChannelFull):
            lease.put(channel, [1, 2], 0, timeout=0)
        assert (staleness.stats.rows.ready, staleness.stats.rows.running) == (1, 0)
    with staleness.lease(1) as lease, pytest.raises(px.channels.ChannelClosed):
        lease.put(channel, [1], 0)
    assert staleness.stats.rows.running == 0
    assert staleness.stats.dropped == {"KeyError: 'filtered'": 2, "could not be put": 3}
    for number in range(120):
        with staleness.lease(1) as lease:
            lease.drop(1, f"{number} {'x' * 1000}")
    assert len(staleness.stats.dropped) == 101 and staleness.stats.dropped["other reasons"] == 22
    staleness.lease(1).end("stale")  # reasons of the library are counted separately
    assert staleness.stats.dropped["stale"] == 1
    assert max(map(len, staleness.stats.dropped)) < 210


def test_a_lease_beyond_the_allowed_lag_waits_for_other_leases_or_the_trainer(
    staleness: px.StalenessManager,
) -> None:
    leases = [staleness.lease(4), staleness.lease(4)]
    with pytest.raises(px.channels.StalenessTimeout, match="lease"):
        staleness.lease(4, timeout=0)
    leases[0].end("aborted")
    leases[0] = staleness.lease(4, timeout=0)
    for lease in leases:
        lease.accept(4, lease.version)
    trainer = threading.Thread(target=lambda: staleness.advance(1))
    trainer.start()
    with staleness.lease(4, WITHIN) as lease:
        assert lease.version == 1
        lease.drop(4, "only looking")
    trainer.join()


def test_rows_of_a_killed_rank_return_their_quota(
    group: px.WorkerGroup, staleness: px.StalenessManager
) -> None:
    group.run(lambda worker, source: setattr(worker, "lease", source.lease(4, WITHIN)), staleness)
    faults.kill(group, 1)
    with staleness.lease(4, WITHIN) as lease:
        lease.drop(4, "only looking")
    assert any("rank 1 of group 'generators'" in reason for reason in staleness.stats.dropped)


@pytest.mark.soak_on_cluster
def test_rows_lost_in_a_channel_return_their_quota(
    group: px.WorkerGroup, staleness: px.StalenessManager
) -> None:
    with px.Channel() as channel:
        group.generate(staleness, channel, 4, 60_000)
        faults.kill(group, 0)
        with pytest.raises(px.channels.ItemsLost):
            channel.take(3, WITHIN)  # waits until the process has died
    assert staleness.stats.dropped == {"lost in the channel": 4, "dropped in the channel": 4}


def test_rows_that_are_or_will_be_too_old_for_training_leave_their_channel(
    staleness: px.StalenessManager,
) -> None:
    strict = px.StalenessManager(max_lag=0, rows_per_version=2)
    with px.Channel() as channel, strict.lease(2) as lease:
        lease.put(channel, torch.zeros(1), 0)
        lease.put(channel, torch.ones(1), 0)
        strict.advance(1, trained=1)
        assert channel.items.dropped >= 1
        assert "stale" in str(channel.explain())
    with px.Channel() as channel, staleness.lease(8) as lease:
        lease.put(channel, [0, 1, 2], 0)
        lease.put(channel, [3, 4, 5, 6, 7], 0)
        staleness.advance(1, trained=0)  # 4 rows are for version 1, later ones would be trained on at lag 2
        assert (staleness.stats.rows.ready, staleness.stats.dropped) == (4, {"stale": 4})
        assert channel.take_rows(4, WITHIN).value() == [0, 1, 2, 3]
        assert channel.rows.dropped == 4


def test_a_lease_is_overdue_once_its_rows_are_too_old(staleness: px.StalenessManager) -> None:
    with staleness.lease(2) as lease:
        staleness.advance(1)
        assert not lease.overdue
        staleness.advance(2)
        assert lease.overdue
        assert lease.accept(1, 0) == ()
    assert (staleness.version, staleness.stats.dropped) == (2, {"stale": 1, "not accepted": 1})


def test_a_restored_staleness_has_the_rows_of_its_channel_and_no_running_rows(backend: str) -> None:
    saved, again, last = (px.StalenessManager(max_lag=1, rows_per_version=4) for _ in range(3))
    with px.Channel(name="saved") as channel, saved.lease(4) as lease:
        lease.put(channel, [1, 2], 0)
        lease.accept(1, 0)
        data = px.channels.snapshot([channel], saved)
        alone = px.channels.snapshot([], saved)
    with px.Channel(name="saved") as channel:
        px.channels.restore(data, [channel], again)
        assert (again.stats.rows.ready, again.stats.restored) == (2, True)
        assert again.stats.dropped == {"restored": 1, "not saved": 1}
        assert channel.drop("filtered") == 1
        assert again.stats.dropped == {"restored": 1, "not saved": 1, "dropped in the channel": 2}
    with pytest.raises(px.channels.ChannelError, match="the snapshot has one: pass it too"):
        px.channels.restore(alone, [])
    earlier = pickle.loads(alone)
    earlier.staleness["outside"] = [ReadyRows()]  # earlier states have the rows that are in no channel
    px.channels.restore(pickle.dumps(earlier), [], last)
    assert last.stats.dropped == {"restored": 1, "not saved": 3}


@pytest.mark.parametrize(("max_lag", "counts"), [(0, (2, 0, 2, 0)), (1, (4, 2, 2, 0))])
def test_a_restore_drops_rows_that_were_trained_on_only_if_they_are_too_old(
    backend: str, max_lag: int, counts: tuple[int, ...]
) -> None:
    saved, again = (px.StalenessManager(max_lag, rows_per_version=2) for _ in range(2))
    with px.Channel(name="saved") as channel, saved.lease(2) as lease:
        lease.put(channel, [1, 2], 0)
        with channel.take_rows(2, WITHIN):
            saved.advance(1)
            data = px.channels.snapshot([channel], saved)
    with px.Channel(name="saved") as channel:
        px.channels.restore(data, [channel], again)
        assert (channel.rows.waiting, channel.rows.dropped) == (counts[1], 2 - counts[1])
        rows = again.stats.rows
        assert (rows.submitted, rows.ready, rows.trained, rows.dropped) == counts


PACKED, TRAINED = threading.Event(), threading.Event()


def slow_lengths(item: list[float]) -> list[float]:
    """Delay the put of negative numbers until training has continued."""
    if item[0] < 0:
        PACKED.set()
        assert TRAINED.wait(WITHIN)
    return item


def test_rows_that_become_stale_during_their_put_are_not_delivered(backend: str) -> None:
    staleness = px.StalenessManager(max_lag=1, rows_per_version=2)
    PACKED.clear()
    TRAINED.clear()

    def put(lease: px.channels.RowLease, value: float) -> int:
        return lease.put(channel, [value, value], lease.version, WITHIN)

    with px.Channel(lengths=slow_lengths) as channel, ThreadPoolExecutor(1) as threads:
        slow = threads.submit(put, staleness.lease(2), -1.0)
        assert PACKED.wait(WITHIN)
        for version in (1, 2):
            put(staleness.lease(2, WITHIN), 1.0)
            channel.take_rows(2, WITHIN).ack()
            staleness.advance(version)
        TRAINED.set()
        assert slow.result(WITHIN) == 0
        with pytest.raises(px.channels.ChannelEmpty):
            channel.take_rows(2, 0)
        assert "1 stale" in str(channel.explain())
    assert (staleness.stats.lags, staleness.stats.dropped) == ({0: 4}, {"stale": 2})


def test_requeued_rows_return_their_quota_when_dropped_and_are_dropped_when_stale(backend: str) -> None:
    staleness = px.StalenessManager(max_lag=0, rows_per_version=4)
    with px.Channel() as channel, staleness.lease(4) as lease:
        lease.put(channel, [1, 2], 0)
        channel.take_rows(1, WITHIN).requeue()
        assert channel.drop("filtered") == 1
        assert (staleness.stats.rows.ready, staleness.stats.rows.dropped) == (0, 2)
        lease.put(channel, [3, 4], 0)
        batch = channel.take_rows(2, WITHIN)
        staleness.advance(1)
        batch.requeue()
        assert (len(channel), channel.rows.dropped) == (0, 4)


def test_a_channel_of_another_backend_and_an_endless_wait_are_refused(backend: str) -> None:
    staleness = px.StalenessManager(max_lag=0, rows_per_version=2, backend="inline")
    different = pytest.raises(px.DeclarationError, match="differ")
    if backend != "inline":
        with px.Channel() as channel, staleness.lease(2) as lease, different:
            lease.put(channel, [1, 2], 0)
    else:
        with staleness.lease(2), pytest.raises(px.channels.StalenessTimeout, match="no other thread"):
            staleness.lease(2)  # nothing could end this wait


@pytest.mark.parametrize("versions", [torch.tensor([0, 0]), torch.tensor(0), [torch.tensor(0)] * 2, 0])
def test_versions_may_be_a_tensor(staleness: px.StalenessManager, versions: Any) -> None:
    with staleness.lease(2) as lease:
        assert lease.accept(2, versions) == (0, 1)


def test_invalid_numbers_and_too_large_leases_are_refused_and_count_nothing(
    staleness: px.StalenessManager,
) -> None:
    with staleness.lease(2) as lease:
        for wrong in (
            lambda: staleness.lease(2.0),  # type: ignore[arg-type]
            lambda: lease.accept(1.0, 0),  # type: ignore[arg-type]
            lambda: lease.accept(-1, 0),
            lambda: lease.accept(1, "0"),  # type: ignore[arg-type]
            lambda: lease.accept(1, [0.5]),  # type: ignore[list-item]
            lambda: lease.drop("1", "late"),  # type: ignore[arg-type]
            lambda: staleness.advance("1"),  # type: ignore[arg-type]
        ):
            with pytest.raises(ValueError, match="whole number"):
                wrong()
        with pytest.raises(ValueError, match="lease"):
            staleness.lease(9)
        assert (staleness.stats.rows.submitted, staleness.stats.rows.running) == (2, 2)
    with pytest.raises(px.DeclarationError, match="whole number"):
        px.StalenessManager(1.5, 4, backend="inline")  # type: ignore[arg-type]


def test_a_closed_staleness_manager_wakes_waiting_leases(staleness: px.StalenessManager) -> None:
    leases = [staleness.lease(4), staleness.lease(4)]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(staleness.lease, 4, WITHIN)
        assert within(WITHIN, lambda: staleness.stats.waiting)
        with staleness:
            leases[0].accept(4, 0)
        with pytest.raises(px.PhalanxError, match="it was closed"):
            waiting.result(WITHIN)
    assert (staleness.stats.waiting, staleness.stats.rows.ready) == (0, 4)
    with pytest.raises(px.PhalanxError, match="it was closed"):
        staleness.lease(1)
