"""Channels between the driver and groups, on each backend."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import torch

import phalanx as px
from phalanx.channels.channel_state import ChannelState, Loss
from phalanx.channels.hub_client import stored_items
from phalanx.channels.payloads import to_bytes
from phalanx.channels.staleness_state import Item
from phalanx.testing import faults
from tests.support.fault_workers import within

SLOW_ON_RAY = True

LARGE = 60_000  # float32, too large to travel in a message
WITHIN = 30.0


def first_numbers(item: dict[str, Any]) -> list[float]:
    return item["x"][:, 0].tolist()


class Producer(px.Worker):
    @px.register
    def produce(self, channel: px.Channel, count: int, width: int = 1) -> int:
        for index in range(count):
            channel.put({"x": torch.full((2, width), 100.0 * self.rank + index)})
        return count


class Consumer(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def first_of_each(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["x"][:, 0].clone()

    @px.register(px.Dispatch.mesh())
    def of_mesh(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["x"][:, 0].clone()

    @px.register(px.Dispatch.ROWS, collect="list")
    def rows(self, batch: dict[str, Any], beside: list[int]) -> int:
        return len(batch["x"]) if len(batch["x"]) == len(beside) else -1

    @px.register
    def width(self, batch: Any) -> int:
        return sum(len(item["x"]) for item in batch)

    @px.register(px.Dispatch.ROWS)
    def refuse(self, batch: dict[str, Any]) -> None:
        raise ValueError("not these")

    @px.register
    def get(self, channel: px.Channel, count: int) -> list[float]:
        return [float(channel.get(WITHIN)["x"][0, 0]) for _ in range(count)]

    @px.register
    def take_rows(self, channel: px.Channel, rows: int) -> list[float]:
        with channel.take_rows(rows, WITHIN) as batch:
            return batch["x"][:, 0].tolist()


@pytest.fixture(scope="module")
def producers(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:2], Producer, name="producers")


@pytest.fixture(scope="module")
def consumers(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[2:4], Consumer, name="consumers")


@pytest.fixture
def mortal(pool: px.ResourcePool) -> Iterator[px.WorkerGroup]:
    with px.WorkerGroup(pool[0:2], Producer, name="mortal") as group:
        yield group


@pytest.fixture
def channel(backend: str) -> Iterator[px.Channel]:
    with px.Channel() as made:
        yield made


def all_are_accounted_for(channel: Any) -> bool:
    return all(
        counts.submitted == counts.delivered + counts.dropped + counts.lost + counts.waiting + counts.taken
        for counts in (channel.items, channel.rows)
    )


def test_driver_and_ranks_exchange_items_in_the_order_of_each_producer(
    producers: px.WorkerGroup, consumers: px.WorkerGroup, channel: px.Channel
) -> None:
    producers.produce(channel, 3)
    got = [float(channel.get(WITHIN)["x"][0, 0]) for _ in range(6)]
    assert sorted(got) == [0, 1, 2, 100, 101, 102]
    assert [each for each in got if each >= 100] == [100, 101, 102]
    assert channel.items.delivered == 6
    for index in range(4):
        channel.put({"x": torch.full((1, LARGE), float(index))})
    assert sorted(each for got in consumers.get(channel, 2) for each in got) == [0, 1, 2, 3]


def test_a_batch_is_sharded_over_ranks_or_a_mesh_without_passing_through_the_driver(
    producers: px.WorkerGroup, consumers: px.WorkerGroup, pool: px.ResourcePool, channel: px.Channel
) -> None:
    producers[0].produce(channel, 5, LARGE)
    before = px.debug.statistics()
    with channel.take_rows(5, WITHIN) as batch:
        assert consumers.first_of_each(batch).tolist() == [0, 0, 1, 1, 2]
    after = px.debug.statistics()
    assert batch.nbytes > 5 * 4 * LARGE
    assert all(
        after[name] - before[name] < 10_000 for name in ("sent_bytes", "stored_bytes", "fetched_bytes")
    )
    with px.WorkerGroup(pool, Consumer, mesh=px.Mesh(dp=2, tp=2)) as group, channel.take_rows(4) as batch:
        assert group.of_mesh(batch).tolist() == [2, 3, 3, 4]
    assert channel.rows.delivered == 9
    assert channel.get(WITHIN)["x"][:, 0].tolist() == [4]


def test_a_one_to_all_method_gets_the_items_of_a_batch_and_its_taker_gets_joined_values(
    producers: px.WorkerGroup, consumers: px.WorkerGroup, channel: px.Channel
) -> None:
    producers.produce(channel, 1, LARGE)
    with channel.take(2, WITHIN) as batch:
        assert consumers.width(batch) == [4, 4]
    producers[1].produce(channel, 2)
    assert consumers[0].take_rows(channel, 3) == [100, 100, 101]
    channel.drop("the last row")
    producers[1].produce(channel, 2, LARGE)
    with channel.take_rows(3, WITHIN) as batch:
        assert batch.value()["x"][:, 0].tolist() == [100, 100, 101]


def test_a_batch_of_a_failed_block_or_call_is_requeued_at_the_front(
    producers: px.WorkerGroup, consumers: px.WorkerGroup, channel: px.Channel
) -> None:
    producers[0].produce(channel, 2)
    with pytest.raises(ValueError, match="not these"), channel.take_rows(3, WITHIN) as batch:
        consumers.refuse(batch)
    batch = channel.take_rows(4, 0)
    assert batch.value()["x"][:, 0].tolist() == [0, 0, 1, 1]
    batch.ack_with(consumers.refuse.submit(batch))
    assert [channel.get(WITHIN)["x"][:, 0].tolist() for _ in range(2)] == [[0, 0], [1, 1]]
    channel.put("kept")
    channel.take(1, 0)  # requeued, because nothing refers to the batch
    assert channel.get(0) == "kept"


@pytest.mark.parametrize("asked", [True, False])
def test_a_batch_is_acknowledged_once_its_call_has_succeeded_and_cannot_be_used_again(
    producers: px.WorkerGroup, consumers: px.WorkerGroup, channel: px.Channel, asked: bool
) -> None:
    producers[0].produce(channel, 2, LARGE)
    batch = channel.take_rows(4, WITHIN)
    future = consumers.first_of_each.submit(batch)
    batch.ack_with(future)
    if asked:
        future.result(WITHIN)
    del future
    assert within(WITHIN, lambda: channel.items.delivered == 2)  # the acknowledgement is on its way
    with pytest.raises(px.DeclarationError, match="was acknowledged; use it before"):
        batch.value()


def test_a_rank_finds_a_channel_by_its_name_which_is_unique(producers: px.WorkerGroup, backend: str) -> None:
    with px.Channel(name="by-name") as channel:
        producers.run(lambda worker: px.Channel.find("by-name").put(worker.rank))
        assert sorted([channel.get(WITHIN), px.Channel.find("by-name").get(WITHIN)]) == [0, 1]
        with pytest.raises(px.DeclarationError, match="by-name"):
            px.Channel(name="by-name")
    with pytest.raises(px.channels.ChannelError, match="by-name"):
        px.Channel.find("by-name")


def test_a_put_into_a_full_channel_times_out_and_leaves_nothing(backend: str) -> None:
    with px.Channel(numpy.int64(1)) as channel:
        channel.put(1)
        with pytest.raises(px.channels.ChannelFull, match="1 item may") as full:
            channel.put(torch.zeros(LARGE), timeout=0)
        assert Future not in map(type, gc.get_referrers(full.value))  # it would keep the item
        assert (channel.items.submitted, channel.get(0)) == (1, 1)
    with px.Channel(1000, "bytes") as channel:
        channel.put(b"0" * 600)
        with pytest.raises(px.channels.ChannelFull, match=r"1000\.?0? B"):
            channel.put(b"0" * 600, timeout=0)


def test_a_put_waits_for_capacity_until_an_item_is_taken_or_the_channel_is_closed(backend: str) -> None:
    with px.Channel(1) as channel, ThreadPoolExecutor(1) as threads:
        channel.put("first")
        taker = threading.Thread(target=channel.get)
        assert len(channel) == 1  # so that the channel knows of this thread
        taker.start()
        channel.put("second", WITHIN)
        taker.join()
        waiting = threads.submit(channel.put, "third", WITHIN)
        assert within(WITHIN, lambda: channel.depth.puts == 1)
        assert channel.get(WITHIN) == "second"
        waiting.result(WITHIN)
        waiting = threads.submit(channel.put, "fourth", WITHIN)
        assert within(WITHIN, lambda: channel.depth.puts == 1)
        channel.close("the trainer has enough")
        with pytest.raises(px.channels.ChannelClosed, match="the trainer has enough"):
            waiting.result(WITHIN)


def test_a_trace_shows_a_put_of_a_rank_that_waits_for_capacity(producers: px.WorkerGroup) -> None:
    def take_once_it_waits() -> None:
        if within(WITHIN, lambda: narrow.depth.puts == 1):
            time.sleep(0.05)  # a trace omits shorter waits
            narrow.get()

    with px.trace() as trace, px.Channel(1, name="narrow") as narrow:
        narrow.put("first")
        taker = threading.Thread(target=take_once_it_waits)
        taker.start()
        producers[0].produce(narrow, 1)
        taker.join()
    found = [(one.name, one.attributes, one.track.rank) for one in trace.events.spans if one.track]
    assert found == [("put waits", {"channel": "narrow"}, 0)]


def test_a_cancelled_get_takes_nothing(channel: px.Channel) -> None:
    async def cancelled() -> Any:
        waiting = asyncio.ensure_future(channel.get_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        channel.put("first")
        return await channel.get_async(WITHIN)

    assert asyncio.run(cancelled()) == "first"
    assert channel.depth.takes == 0


def test_the_item_of_an_interrupted_put_is_dropped_and_counted(
    channel: px.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("phalanx.channels.hub_client.PendingRequest._wait", Mock(side_effect=KeyboardInterrupt))
        channel.put(torch.zeros(LARGE))
    channel.put("next")
    assert channel.get(WITHIN) == "next"
    assert (channel.items.dropped, channel.items.lost) == (1, 0)
    assert "1 its put was withdrawn" in str(channel.explain())


def test_items_that_cannot_be_taken_as_rows_are_refused_and_can_be_taken(channel: px.Channel) -> None:
    channel.put([1, 2, 3])
    with pytest.raises(px.channels.ChannelEmpty, match="but at the timeout there were 1 items with 3 rows"):
        channel.take_rows(5, timeout=0)
    assert channel.get(0) == [1, 2, 3]
    channel.put("text")
    with pytest.raises(px.channels.ChannelError, match="not made of rows"):
        channel.take_rows(1, timeout=0)
    assert channel.get(0) == "text"
    channel.put({"x": [1, 2]})
    channel.put({"x": torch.zeros(2)})
    not_alike = pytest.raises(px.DispatchError, match=r"not alike; .* by take\(n\)")
    with not_alike, channel.take_rows(4, 0) as batch:
        batch.value()
    assert len(channel.take(2, 0).value()) == 2


def test_a_finished_channel_delivers_its_remaining_items_and_a_closed_channel_raises_in_ranks(
    consumers: px.WorkerGroup, channel: px.Channel
) -> None:
    channel.put("last")
    channel.finish()
    with pytest.raises(px.channels.ChannelClosed, match=r"nothing can be put$"):  # taking is still possible
        channel.put("late")
    assert list(channel) == ["last"]
    with pytest.raises(px.channels.ChannelClosed, match="finished"):
        channel.put("late")
    channel.close()
    assert list(channel) == []
    with pytest.raises(px.channels.ChannelClosed, match=r"ChannelClosed: .*it was closed") as caught:
        consumers.get(channel, 1)
    assert isinstance(caught.value, px.RemoteCallError) and caught.value.channel == channel.name


def test_waiting_items_can_be_dropped_all_or_by_number_and_are_counted(channel: px.Channel) -> None:
    channel.put_many([1, 2])
    assert channel.drop("too old") == 2
    channel.put_many(["kept", "late"])
    assert channel.drop("late", [numpy.int64(3)]) == 1
    assert "2 too old" in str(channel.explain())
    assert all_are_accounted_for(channel)
    assert channel.take(numpy.int64(1), 0).value() == ["kept"]


def test_lost_items_of_a_killed_rank_are_reported_to_one_taker_or_in_a_warning_at_close(
    mortal: px.WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with px.Channel(name="untold") as untold:
        with px.Channel(name="told") as channel:
            mortal.produce(channel, 2, LARGE)
            mortal[1].produce(untold, 1, LARGE)
            faults.kill(mortal, 1)
            lost = r"2 items, 4 rows of rank 1 of group 'mortal'"
            with pytest.raises(px.channels.ItemsLost, match=lost) as raised:
                channel.take(5, WITHIN)  # waits until the process has died
            assert raised.value.losses[0].items == 2
            assert channel.take_rows(4, 0).value()["x"][:, 0].tolist() == [0, 0, 1, 1]
            assert channel.items.lost == 2
            assert all_are_accounted_for(channel)
        assert within(WITHIN, lambda: untold.items.lost == 1)
        assert "lost" not in caplog.text
    assert "'untold' was closed before a take reported" in caplog.text
    assert "1 item, 2 rows of rank 1 of group 'mortal'" in caplog.text


def test_an_item_lost_while_it_is_taken_is_reported_only_to_its_taker() -> None:
    channel = ChannelState()
    channel.put(lambda answer: None, Item(("producer", 0), "stored there", 8, rows=3))
    channel.take(("consumer", 0), lambda answer: None, 3, by_rows=True, at_least=3)
    channel.peer_died("producer", "it was killed")
    losses = channel.requeue(("consumer", 0), unreadable={0})
    assert losses == [Loss("producer", "it was killed", items=1, rows=3)]
    assert (channel.losses, channel.items.lost) == ([], 1)


@pytest.mark.slow_on_cluster
def test_unacknowledged_items_of_a_killed_consumer_are_requeued_in_order(
    pool: px.ResourcePool, channel: px.Channel
) -> None:
    with px.WorkerGroup(pool[2:3], Consumer) as group:
        channel.put_many(range(4))
        group.run(lambda worker, source: setattr(worker, "taken", source.take(2, WITHIN)), channel)
        assert len(channel) == 2
        faults.kill(group, 0)
        assert channel.take(4, WITHIN).value() == [0, 1, 2, 3]


@pytest.mark.slow_on_cluster
def test_small_items_outlive_a_closed_rank_and_large_items_do_with_handoff(
    mortal: px.WorkerGroup, channel: px.Channel
) -> None:
    with px.Channel(handoff=True) as handed, px.Channel() as a, px.Channel() as b, px.Channel() as c:
        mortal.produce(channel, 1)
        for each in (handed, a, b, c):  # a rank has less time than the sum of what it waits for each
            mortal[0].produce(each, 2, LARGE)
        mortal.close()
        assert channel.take_rows(4, 0).value()["x"].sum() == 200
        assert handed.take_rows(4, 0).value()["x"][:, 0].tolist() == [0, 0, 1, 1]
        assert all_are_accounted_for(handed)


@pytest.mark.slow_on_cluster
def test_items_that_a_rank_handed_over_survive_its_death(mortal: px.WorkerGroup, channel: px.Channel) -> None:
    mortal.produce(channel, 1, LARGE)
    mortal.run(lambda worker, left: left.leave(0, handoff=True), channel)
    faults.kill(mortal, 0)
    assert channel.take_rows(4, WITHIN).rows == 4


def test_an_inline_wait_that_nothing_can_end_is_an_error_despite_timers_and_idle_threads() -> None:
    timer = threading.Timer(60.0, int)
    timer.start()
    with ThreadPoolExecutor(2) as pool, px.Channel(1, backend="inline") as channel:
        list(pool.map(abs, range(4)))
        channel.put(1)
        with pytest.raises(px.channels.ChannelFull, match="no other thread"):
            channel.put(2)
        with pytest.raises(px.channels.ChannelEmpty, match="no other thread"):
            channel.take(2)
    timer.cancel()


def test_a_balanced_batch_has_shards_of_equal_length(consumers: px.WorkerGroup) -> None:
    with px.Channel(lengths="n") as channel:
        channel.put({"x": torch.arange(4.0)[:, None], "n": [9, 1, 8, 2]})
        channel.put({"x": torch.arange(4.0, 6.0)[:, None], "n": [5, 5]})
        with channel.take_rows(6, 0, balance=2) as batch:
            order = consumers.first_of_each(batch).tolist()
            assert order == batch.value()["x"][:, 0].tolist()
    length = dict(enumerate([9, 1, 8, 2, 5, 5]))
    assert [sum(length[int(row)] for row in piece) for piece in (order[:3], order[3:])] == [15, 15]
    assert sorted(order) == [0, 1, 2, 3, 4, 5]


def test_a_sorted_batch_does_not_depend_on_the_order_of_its_puts(consumers: px.WorkerGroup) -> None:
    with px.Channel(lengths=first_numbers) as channel:
        for numbers in ([6.0, 2.0, 3.0], [0.0, 5.0], [1.0, 4.0, 9.0]):
            channel.put({"x": torch.tensor(numbers)[:, None]})
        with channel.take_rows(7, WITHIN, sort=True) as batch:
            assert consumers.first_of_each(batch).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert channel.take_rows(1, WITHIN).value()["x"].item() == 9.0


def test_items_without_rows_do_not_change_shards_and_fit_sorted_and_balanced_batches(
    consumers: px.WorkerGroup,
) -> None:
    with px.Channel(lengths="n") as channel:
        for rows in (0, 0, 0, 4):
            channel.put({"x": torch.arange(float(rows))[:, None], "n": [1] * rows})
        with channel.take_rows(4, WITHIN) as batch:
            assert consumers.rows(batch, [0, 1, 2, 3]) == [2] * len(consumers.ranks)
    for order in ({"sort": True}, {"balance": 2}):
        with px.Channel(lengths="n") as channel:
            channel.put_many([{"x": torch.zeros(0, 1), "n": []}] * 2)
            channel.finish()
            with channel.take_rows(4, WITHIN, **order) as batch:
                assert (batch.value()["x"].shape, len(consumers.first_of_each(batch))) == ((0, 1), 0)
            assert channel.items.delivered == 2


@pytest.mark.parametrize("end", ["ack", "requeue"])
def test_a_finished_batch_cannot_be_used_again(
    consumers: px.WorkerGroup, channel: px.Channel, end: str
) -> None:
    channel.put({"x": torch.zeros(2, 1)})
    batch = channel.take_rows(2, WITHIN)
    getattr(batch, end)()
    for use in (batch.value, lambda: consumers.first_of_each(batch)):
        with pytest.raises(px.DeclarationError, match=r"was (acknowledged|requeued); use it before"):
            use()


def test_rows_are_ordered_only_if_they_have_lengths_from_0(channel: px.Channel) -> None:
    channel.put([2, 1])
    for order in ({"balance": 2}, {"sort": True}):
        with pytest.raises(px.DeclarationError, match="no lengths"):
            channel.take_rows(2, 0, **order)
    assert len(channel) == 1
    with px.Channel(lengths=lambda item: item, backend="inline") as negative:
        negative.put([1, -1])
        with pytest.raises(px.DispatchError, match="length of row 1 is -1"):
            negative.take_rows(2, 0, balance=2)
        assert negative.take_rows(2, 0, sort=True).value() == [-1, 1]


@pytest.mark.parametrize(
    "order",
    [{"balance": 0}, {"balance": True}, {"balance": "a"}, {"balance": 2.5}, {"balance": 2, "sort": True}],
)
def test_a_take_with_an_invalid_order_takes_nothing(order: dict[str, Any]) -> None:
    with px.Channel(lengths="n", backend="inline") as channel:
        channel.put({"n": [numpy.int64(1), 2]})
        with pytest.raises(px.DeclarationError, match=r"whole number from 1|one of the two"):
            channel.take_rows(2, 0, **order)
        assert len(channel) == 1


def test_lengths_must_be_one_finite_number_for_each_row() -> None:
    with px.Channel(lengths="n", backend="inline") as channel:
        for item in (
            [1, 2],
            {"x": [1, 2]},
            {"n": [1.0, float("nan")]},
            {"x": [1, 2], "n": [1]},
            {"x": [1, 2], "n": 2},
            {"x": [1, 2], "n": numpy.array(2)},
        ):
            with pytest.raises(px.DispatchError, match=r"under the key 'n'|one finite number for each row"):
                channel.put(item)
        assert channel.items.submitted == 0
        for numbers in [numpy.int64(3), numpy.int64(1)], [numpy.float32(3), True]:
            channel.put({"x": ["long", "short"], "n": numbers})
            with channel.take_rows(2, 0, balance=2) as batch:
                assert batch.value()["x"] == ["long", "short"]


def test_a_restored_channel_has_waiting_and_taken_items_with_their_lengths(producers: px.WorkerGroup) -> None:
    with px.Channel(name="saved", lengths=first_numbers) as channel:
        producers[0].produce(channel, 3, LARGE)
        with channel.take_rows(1, WITHIN):
            data = px.channels.snapshot([channel])
    with px.Channel(name="saved", lengths=first_numbers) as again:
        px.channels.restore(data, [again])
        assert (again.name, again.items.waiting, again.rows.waiting) == ("saved", 3, 6)
        again.put({"x": torch.full((1, LARGE), 0.5)})
        with again.take_rows(7, 0, sort=True) as batch:
            assert batch.value()["x"][:, 0].tolist() == [0, 0, 0.5, 1, 1, 2, 2]


def test_a_restored_channel_looks_up_the_lengths_of_its_items(backend: str) -> None:
    with px.Channel(name="saved") as channel:
        channel.put({"x": torch.full((1, LARGE), 2.0)})
        channel.put({"x": torch.tensor([[3.0], [1.0]])})
        data = px.channels.snapshot([channel])
    stored = len(stored_items)
    with px.Channel(name="saved", lengths="n") as again:
        with pytest.raises(px.DispatchError, match="channel 'saved': an item of type dict has no value"):
            px.channels.restore(data, [again])
        assert (again.items.submitted, len(stored_items)) == (0, stored)
    with px.Channel(name="saved", lengths=first_numbers) as again:
        px.channels.restore(data, [again])
        with again.take(1, WITHIN), again.take_rows(2, WITHIN, sort=True) as batch:
            assert batch.value()["x"][:, 0].tolist() == [1, 3]


def test_a_used_channel_is_not_restored_and_a_closed_channel_is_not_saved(backend: str) -> None:
    with px.Channel(name="saved") as channel:
        channel.put(torch.zeros(LARGE))
        data, stored = px.channels.snapshot([channel]), len(stored_items)
        with pytest.raises(px.DeclarationError, match="put into channel 'saved' already"):
            px.channels.restore(data, [channel])
        assert len(stored_items) == stored
        for unreadable in (b"", b"xx", data.replace(b"ChannelSnapshot", b"RemovedSnapshot")):
            with pytest.raises(px.channels.ChannelError, match="cannot be read"):
                px.channels.restore(unreadable, [channel])
    for nothing in (lambda: px.channels.snapshot([]), lambda: px.channels.restore(data, [])):
        with pytest.raises(px.channels.ChannelError):
            nothing()
    with pytest.raises(px.channels.ChannelError, match="closed"):
        px.channels.snapshot([channel])


def test_a_snapshot_leaves_out_an_item_acknowledged_while_it_is_read(
    channel: px.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(stored_items)
    channel.put(torch.zeros(LARGE))
    channel.put("small")
    batch = channel.take(1, WITHIN)

    def acknowledge_and_read(*args: Any) -> bytes:
        batch.ack()
        assert within(WITHIN, lambda: len(stored_items) == before)
        return to_bytes(*args)

    monkeypatch.setattr("phalanx.channels.channel_snapshots.to_bytes", acknowledge_and_read)
    data = px.channels.snapshot([channel])
    channel.close()
    with px.Channel(name=channel.name) as again:
        px.channels.restore(data, [again])
        assert (again.get(WITHIN), again.items.delivered, len(again)) == ("small", 2, 0)


def test_several_items_are_put_and_taken_at_once(channel: px.Channel) -> None:
    assert channel.put_many(["a", "b", "c"]) == [0, 1, 2]
    with channel.take(5, WITHIN, at_least=1) as batch:
        assert batch.value() == ["a", "b", "c"]
    with px.Channel(2) as narrow:
        with pytest.raises(px.channels.ChannelFull):
            narrow.put_many([0, 1, 2, 3], timeout=0)
        assert (narrow.items.submitted, narrow.take(2, WITHIN).value()) == (2, [0, 1])
    with px.Channel(1) as narrow:
        narrow.put("first")
        with pytest.raises(px.DispatchError):
            narrow.put_many(["second", threading.Lock()])  # fails before an item waits for capacity
        assert (narrow.get(0), narrow.depth.puts, narrow.items.waiting) == ("first", 0, 0)
