"""Ranks leave a group while others still need their streams or their items in channels."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import phalanx as px

SLOW_ON_RAY = True
LARGE = 60_000  # float32, too large to travel in a message


class Teller(px.Worker):
    independent = True

    @px.register
    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    @px.register
    def produce(self, channel: px.Channel, count: int) -> None:
        import torch  # imported here: the module's other groups start faster without torch

        for index in range(count):
            channel.put(torch.full((LARGE,), 10.0 * self.rank + index))

    @px.register
    def consume(self, channel: px.Channel, count: int) -> list[float]:
        return [float(channel.get(30.0)[0]) for _ in range(count)]


class Loop(px.Worker):
    """An asynchronous worker, as engines are."""

    independent = True

    @px.register
    async def count(self, to: int):  # type: ignore[no-untyped-def]
        for number in range(to):
            yield number

    @px.register
    async def wait(self) -> None:
        await asyncio.sleep(3600)


@pytest.mark.parametrize(("kind", "concurrency"), [(Teller, None), (Loop, 8)])
def test_an_unread_stream_of_a_leaving_rank_is_read_to_its_end(
    two: px.ResourcePool, kind: type[px.Worker], concurrency: int | None
) -> None:
    group = px.WorkerGroup(two, kind, max_concurrency=concurrency)
    with group[1].count.stream(100, buffer=2) as items:
        first = next(items)
        px.resize(group, 1)

        assert [first, *items] == list(range(100))
    assert len(group) == 1


@pytest.mark.slow
def test_a_leaving_rank_stays_for_a_call_that_has_not_arrived(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with px.ResourcePool([2]) as pool:
        group = px.WorkerGroup(pool, Loop, max_concurrency=8)
        waiting = group.wait.submit()
        # As if the call had not arrived.
        monkeypatch.setattr(type(pool.backend_api), "inspect", lambda *_: [SimpleNamespace(running=())])
        with pytest.raises(px.CallTimeout, match=r"ranks \[1\] are still running calls"):
            px.resize(group, 1, timeout=0.5)
        waiting.cancel()


def test_a_stream_over_all_ranks_is_complete_after_a_rank_left(two: px.ResourcePool) -> None:
    group = px.WorkerGroup(two, Teller)
    with group.count.stream(50, buffer=2) as items:
        px.resize(group, 1)

        found = sorted(items)

    assert found == [(rank, number) for rank in range(2) for number in range(50)]


def test_a_leaving_rank_runs_its_close(three: px.ResourcePool, tmp_path: Path) -> None:
    def note_close(worker: Any) -> None:
        worker.close = (tmp_path / str(worker.rank)).touch

    group = px.WorkerGroup(three, Teller)
    group.run(note_close)
    px.resize(group, 1)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_leaving_rank_finishes_its_call_and_its_channel_items_remain(two: px.ResourcePool) -> None:
    group = px.WorkerGroup(two, Teller)
    with px.Channel() as channel:
        group[0].produce(channel, 3)
        group[1].produce(channel, 3)
        taken = group[1].consume.submit(channel, 3)
        px.resize(group, 1)

        assert taken.result() == [0.0, 1.0, 2.0]
        assert group[0].consume(channel, 1) == [10.0]
        assert [float(channel.get(30.0)[0]) for _ in range(2)] == [11.0, 12.0]
