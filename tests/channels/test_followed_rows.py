"""Rows that were accepted and are on their way into a channel: they count until they are in, or never will be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.channels.services import services
from phalanx.channels.staleness_server import Lies, StalenessService
from tests.support.fault_workers import within

WITHIN = 30.0


class Producer:
    """Another process, as the home of a staleness sees it."""

    def __init__(self, staleness: px.StalenessManager, name: str = "producer#1") -> None:
        self.name = name
        service = services.get(staleness.card.key)
        assert isinstance(service, StalenessService)
        self.home = service

    def tell(self, service: str, note: Any) -> None:
        """It hears of nothing."""

    def ask(self, verb: str, *args: Any) -> Any:
        answers: list[Any] = []
        self.home.ask(self, (self.name, verb), answers.append, verb, args)
        return answers[0]

    def offer(self, rows: int) -> int:
        """Have rows accepted that are put next; the lease."""
        _, lease, version = self.ask("begin", rows, 0.0)
        assert self.ask("offer", lease, rows, version) == (
            "accepted",
            tuple(range(rows)),
            Lies(lease, 0, rows),
        )
        return lease


@pytest.fixture
def staleness() -> px.StalenessManager:
    return px.StalenessManager(max_lag=0, rows_per_version=4, backend="inline")


@pytest.fixture
def full() -> Iterator[px.Channel]:
    with px.Channel(1, backend="inline") as channel:
        channel.put("first")
        yield channel


def test_rows_on_their_way_when_their_process_ended_give_their_credit_back(
    staleness: px.StalenessManager,
) -> None:
    producer = Producer(staleness)
    producer.offer(4)
    assert staleness.paced.rows.ready == 4
    producer.home.left(producer, "it was killed")
    assert (staleness.paced.rows.ready, staleness.paced.dropped) == (0, {"producer: it was killed": 4})
    assert staleness.begin(4, timeout=0).rows == 4


def test_rows_on_their_way_when_their_lease_ended_give_their_credit_back(
    staleness: px.StalenessManager,
) -> None:
    producer = Producer(staleness)
    producer.ask("end", producer.offer(4), "CallCancelled: it was interrupted")
    assert (staleness.paced.rows.ready, staleness.paced.rows.dropped) == (0, 4)


def test_rows_that_came_in_and_their_process_ended_still_count(staleness: px.StalenessManager) -> None:
    producer = Producer(staleness)
    with px.Channel(backend="inline") as channel:
        lease = producer.offer(4)
        assert producer.home.follow(channel.card.key, channel.put([1, 2, 3, 4]), Lies(lease, 0, 4))
        producer.home.left(producer, "it was killed")
        assert staleness.paced.rows.ready == 4


def test_rows_are_put_in_an_event_loop(staleness: px.StalenessManager) -> None:
    async def put(lease: Any, channel: px.Channel) -> int:
        return await lease.put_async(channel, torch.arange(2), lease.version)

    with px.Channel(backend="inline") as channel, staleness.begin(2) as lease:
        assert asyncio.run(put(lease, channel)) == 2
        assert (staleness.paced.rows.ready, channel.rows.waiting) == (2, 2)
        channel.drop("filtered")
        assert staleness.paced.dropped == {"dropped in the channel": 2}


def test_a_put_that_is_cancelled_in_an_event_loop_gives_its_credit_back(
    staleness: px.StalenessManager, full: px.Channel
) -> None:
    async def given_up(lease: Any) -> None:
        waiting = asyncio.ensure_future(lease.put_async(full, torch.arange(4), 0))
        while not full.depth.puts:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with staleness.begin(4) as lease:
        asyncio.run(given_up(lease))
    assert staleness.paced.dropped == {"could not be put": 4}
    assert full.depth.puts == 0


def test_rows_that_became_too_old_while_their_put_waited_do_not_come_in(
    staleness: px.StalenessManager, full: px.Channel
) -> None:
    with staleness.begin(4) as lease:
        putting = threading.Thread(target=lease.put, args=(full, torch.zeros(4), 0, WITHIN))
        putting.start()
        assert within(WITHIN, lambda: full.depth.puts == 1)
        staleness.advance(1, trained=0)
        assert full.get(WITHIN) == "first"
        putting.join()
    assert (full.items.dropped, len(full)) == (1, 0)
    assert staleness.paced.dropped == {"stale": 4}
