"""Syncs to asynchronous ranks, where Ray starts calls in any order: here, always the last call first."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import NAME, Actor, network, same


def last_comes_first() -> None:
    """Start concurrent calls of this rank in reverse order, if they need no result of another call."""
    from phalanx.backends.ray.worker_actor import AsyncWorkerActor

    come, numbers, waiting = AsyncWorkerActor._px_come, itertools.count(), set[int]()

    async def out_of_order(self: AsyncWorkerActor, refs: Sequence[Any]) -> None:
        if not refs:
            mine = next(numbers)
            waiting.add(mine)
            await asyncio.sleep(0.3)  # calls sent at about the same time have arrived by then
            while max(waiting) > mine:
                await asyncio.sleep(0.01)
            waiting.discard(mine)
        await come(self, refs)

    AsyncWorkerActor._px_come = out_of_order


class Engine(px.Worker):
    """Accepts weights on an asynchronous rank."""

    def __init__(self) -> None:
        last_comes_first()
        self.model = network(1)
        self.accept_weights(NAME, self.model)

    @px.register
    async def values(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters()}


@pytest.mark.slow
def test_concurrent_syncs_are_applied_in_order(ray_cluster: None) -> None:
    with (
        px.ResourcePool([3], use_gpu=False) as pool,
        px.WorkerGroup(pool[0:1], Actor) as source,
        px.WorkerGroup(pool[1:3], Engine, max_concurrency=16) as engine,
        px.WeightSync(source, engine, NAME) as sync,
    ):
        sync()
        _, futures = zip(*((source.train.submit(), sync.submit()) for _ in range(3)), strict=True)
        numbers = [future.result(60).number for future in futures]

        assert numbers == sorted(set(numbers))
        (now,) = source.values()
        assert all(same(now, one) for one in engine.values())
