"""Channels between processes: cancelled waits, drivers and ranks that die, async ranks."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import phalanx as px
from phalanx.channels.hub_client import hubs, stored_items
from phalanx.testing import faults
from tests.channels.test_channel import LARGE, WITHIN, all_are_accounted_for
from tests.support.fault_workers import within
from tests.support.scripts import start

pytestmark = pytest.mark.slow
BY_VALUE = True

LEAVING = """
import ray
import phalanx as px

px.init(num_cpus=2)
group = px.WorkerGroup(px.ResourcePool([1], use_gpu=False), px.Worker)
channel = px.Channel(name="of-before")
group.run(lambda worker, channel: channel.put(bytes(1 << 20)), channel)
{leave}
try:
    channel.put(3)
except px.channels.ChannelClosed:
    print("closed", ray.is_initialized())
px.init(num_cpus=2)
try:
    px.Channel.find("of-before")
except px.channels.ChannelError:
    print("not found")
with px.Channel(name="of-before") as again:
    again.put(4)
    print(again.get())
"""
OPEN = """
import phalanx as px

px.init(num_cpus=2)
group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False), px.Worker)
channel = px.Channel()
channel.put(1)
batch = channel.take(1)
print(group.run(lambda worker: worker.rank))
"""


class Putter(px.Worker):
    @px.register
    def put_twice(self, channel: px.Channel) -> None:
        import torch

        channel.put(1)
        channel.put(torch.zeros(LARGE))

    @px.register
    def generate_many(
        self, staleness: px.StalenessManager, channel: px.Channel, leases: int, width: int
    ) -> None:
        import torch

        for _ in range(leases):
            with staleness.lease(2, 2.0) as lease:
                lease.put(channel, torch.zeros(2, width), lease.version, 2.0)

    @px.register
    def consume(self, channel: px.Channel, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(px.channels.ItemsLost), channel.take_rows(1, 2.0) as batch:
                time.sleep(0.01 * len(batch))

    @px.register
    def count(self, rows: list[int]) -> int:
        return len(rows)

    @px.register
    def fail_with(self, channel: px.Channel) -> None:
        batch = channel.take(1, WITHIN)
        raise ValueError(len(batch))

    @px.register
    def rank_of(self) -> int:
        return self.rank

    @px.register
    def open(self, name: str | None = None) -> str:
        self.opened = px.Channel(name=name)
        return self.opened.name


class Server(px.Worker):
    @px.register
    async def pass_on(self, source: px.Channel, target: px.Channel) -> int:
        item = await source.get_async(WITHIN)
        await target.put_async(item + 1, WITHIN)
        return item


def ended(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "driver.py"
    path.write_text(script)
    return start(path, backend="ray", folder=folder)


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as made:
        yield made


def test_closing_a_rank_waits_until_its_items_are_delivered(pool: px.ResourcePool) -> None:
    with px.Channel(backend="ray") as channel, ThreadPoolExecutor(1) as threads:
        group = px.WorkerGroup(pool[0:1], Putter)
        group.put_twice(channel)
        batch = channel.take(2, WITHIN)
        closing = threads.submit(group.close)
        assert within(WITHIN, lambda: bool(channel.status.leaving) or closing.done())
        assert not closing.done()
        batch.ack()
        closing.result(WITHIN)
        assert (channel.items.delivered, channel.items.lost) == (2, 0)


def test_a_snapshot_after_a_call_lacks_the_items_that_the_call_acknowledged(pool: px.ResourcePool) -> None:
    snapshots: list[bytes] = []
    with px.WorkerGroup(pool[0:1], Putter) as group, px.Channel(name="saved", backend="ray") as channel:
        for number in range(5):
            channel.put([number])
            group.consume(channel, 1)
            snapshots.append(px.channels.snapshot([channel]))
            channel.put([number])
            batch = channel.take_rows(1)
            counted = group.count.submit(batch)
            batch.ack_with(counted)
            assert counted.result() == [1]
            snapshots.append(px.channels.snapshot([channel]))
    for snapshot in snapshots:
        with px.Channel(name="saved", backend="ray") as again:
            px.channels.restore(snapshot, [again])
            assert again.items.waiting == 0


def test_names_of_channels_that_ranks_create_are_free_after_the_rank_was_killed(
    pool: px.ResourcePool,
) -> None:
    with px.WorkerGroup(pool, Putter) as group:
        assert len(set(group.open())) == 2
        group[0].open("of-a-rank")
        with pytest.raises(px.DeclarationError, match="is open in this run"):
            px.Channel(name="of-a-rank")
        faults.kill(group, 0)

        def is_open() -> bool:  # until its hub has ended too
            with contextlib.suppress(px.channels.ChannelError):
                return bool(px.Channel.find("of-a-rank"))
            return False

        assert within(WITHIN, lambda: not is_open())
        with px.Channel(name="of-a-rank") as channel:
            channel.put(1)
            assert px.Channel.find("of-a-rank").get(WITHIN) == 1


@pytest.mark.parametrize("leave", [pytest.param("px.shutdown()", marks=pytest.mark.soak), "ray.shutdown()"])
def test_leaving_a_cluster_closes_its_channels(leave: str, tmp_path: Path) -> None:
    driver = ended(LEAVING.format(leave=leave), tmp_path)
    assert driver.stdout.splitlines()[-3:] == ["closed False", "not found", "4"], driver


def test_a_waiting_put_is_in_the_stall_report_and_ends_with_capacity_or_with_its_call(
    pool: px.ResourcePool, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> bool:
        texts = [record.getMessage() for record in caplog.records]
        return any("stalled" in text and "in put_twice" in text and "in put\n" in text for text in texts)

    with (
        caplog.at_level("WARNING", "phalanx"),
        px.WorkerGroup(pool, Putter) as group,
        px.Channel(1, backend="ray") as channel,
    ):
        future = group.put_twice.options(stall_report_after=0.1).submit(channel)
        assert within(WITHIN, told)
        channel.take(4, WITHIN).ack()
        assert future.result(WITHIN) == [None, None]
        future = group[0].put_twice.submit(channel)
        assert within(WITHIN, lambda: channel.depth.puts == 1)
        assert future.cancel()
        assert group.rank_of() == [0, 1]
        assert (channel.depth.puts, channel.items.submitted) == (0, 5)
        with pytest.raises(px.CallTimeout, match="in put"):
            group[0].put_twice.options(timeout=1.0)(channel)


def test_any_skips_a_busy_rank_and_items_that_a_failed_call_took_are_requeued(pool: px.ResourcePool) -> None:
    with px.WorkerGroup(pool, Putter) as group, px.Channel(1, backend="ray") as channel:
        for busy in (0, 1, 0):
            future = group[busy].put_twice.submit(channel)
            assert within(WITHIN, lambda: channel.depth.puts == 1)
            assert [group.any.rank_of() for _ in range(3)] == [1 - busy] * 3
            channel.drop("enough")
            future.result()
            channel.drop("enough")
        channel.put("kept")
        with pytest.raises(ValueError, match="1"):
            group[0].fail_with(channel)
        assert channel.get(WITHIN) == "kept"


def test_async_ranks_wait_at_channels_concurrently(pool: px.ResourcePool) -> None:
    source, target = px.Channel(backend="ray"), px.Channel(backend="ray")
    with source, target, px.WorkerGroup(pool[0:1], Server, max_concurrency=4) as group:
        futures = [group.pass_on.submit(source, target) for _ in range(3)]
        for number in range(3):
            source.put(number)
        assert sorted(target.get(WITHIN) for _ in range(3)) == [1, 2, 3]
        assert sorted(px.gather(*futures, timeout=WITHIN)) == [[0], [1], [2]]


def test_the_death_of_the_hub_raises_in_waiting_callers_and_frees_items(pool: px.ResourcePool) -> None:
    with px.WorkerGroup(pool[0:1], Putter) as group:
        channel = px.Channel(1, backend="ray")
        future = group.put_twice.submit(channel)
        assert within(WITHIN, lambda: channel.depth.puts == 1)
        with ThreadPoolExecutor(1) as threads:
            short = px.Channel(backend="ray")
            short.put_many([bytes(4 * LARGE)] * 2)
            taken = short.take(1)
            waiting = threads.submit(short.take, 5, WITHIN)
            assert within(WITHIN, lambda: short.depth.takes == 1)
            assert stored_items
            hubs.stop(None)
            with pytest.raises(px.channels.ChannelClosed, match="the process that hosts it died"):
                waiting.result(5)
        assert not stored_items
        with pytest.raises(px.channels.ChannelClosed, match="died"):
            future.result(5)
        with pytest.raises(px.channels.ChannelClosed, match="died"):
            list(short)  # an error, not the end of the loop
        with pytest.raises(px.channels.ChannelClosed, match="died"), taken:
            taken.value()
        with px.Channel(backend="ray") as another:
            another.put("on a new hub")
            assert another.get(WITHIN) == "on a new hub"
        channel.close()
        short.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_kills_at_random_moments_leave_every_item_and_row_counted(pool: px.ResourcePool, seed: int) -> None:
    chance = random.Random(seed)
    staleness = px.StalenessManager(max_lag=2, rows_per_version=4, backend="ray")
    with px.Channel(chance.choice([None, 2]), backend="ray") as channel:
        with px.WorkerGroup(pool[0:1], Putter) as producer, px.WorkerGroup(pool[1:2], Putter) as consumer:
            futures = [producer.generate_many.submit(staleness, channel, 20, chance.choice([1, LARGE]))]
            futures += [consumer.consume.submit(channel, 5)]
            time.sleep(chance.random())
            for version in range(1, chance.randint(2, 5)):
                staleness.advance(version, trained=0)
            faults.kill(chance.choice([producer, consumer]), 0)
            time.sleep(0.2)
            channel.finish()
            for future in futures:
                future.exception(WITHIN)
        assert all_are_accounted_for(channel)
        rows = staleness.stats.rows
        assert rows.submitted == rows.accepted + rows.dropped + rows.running


def test_a_script_that_ends_with_an_open_channel_and_group_prints_no_traceback(tmp_path: Path) -> None:
    driver = ended(OPEN, tmp_path)
    assert (driver.returncode, driver.stdout) == (0, "[0, 1]\n")
    assert "Traceback" not in driver.stderr and "not everything" not in driver.stderr, driver
