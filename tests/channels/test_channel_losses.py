"""What a channel says of items that are lost, where nobody takes any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import phalanx as px
from phalanx.channels.channel_state import ChannelState, Item, Loss
from phalanx.testing import faults


class Producer(px.Worker):
    @px.register
    def put(self, channel: px.Channel) -> None:
        channel.put(torch.zeros(3, 60_000))


@pytest.fixture
def group() -> Iterator[px.WorkerGroup]:
    with (
        px.ResourcePool([2], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, Producer, name="mortal") as made,
    ):
        yield made


def test_a_loss_that_nobody_was_told_of_is_a_warning_at_the_end(
    group: px.WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with px.Channel(name="rollouts", backend="inline") as channel:
        group.put(channel)
        faults.kill(group, 1)
        assert channel.items.lost == 1
    assert "'rollouts' was closed before anybody took" in caplog.text
    assert "1 item, 3 rows of rank 1 of group 'mortal'" in caplog.text


def test_an_item_that_is_lost_while_it_is_taken_is_told_to_its_taker_only() -> None:
    channel = ChannelState()
    channel.put(lambda answer: None, Item(("producer", 0), "stored there", 8, rows=3))
    channel.take(("consumer", 0), lambda answer: None, 3, by_rows=True, at_least=3)
    channel.peer_died("producer", "it was killed")
    losses = channel.requeue(("consumer", 0), unreadable={0})
    assert losses == [Loss("producer", "it was killed", items=1, rows=3)]
    assert (channel.losses, channel.items.lost) == ([], 1)


def test_a_loss_that_a_taker_was_told_of_is_told_once(
    group: px.WorkerGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with px.Channel(backend="inline") as channel:
        group.put(channel)
        faults.kill(group, 1)
        with pytest.raises(px.channels.ItemsLost):
            channel.get(0)
        channel.get(0)
    assert "lost" not in caplog.text
