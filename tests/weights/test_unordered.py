"""Weights for asynchronous ranks, on which Ray begins calls in any order: here always the one that was sent last."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import NAME, Actor, network, same


def last_comes_first() -> None:
    """Have calls of this rank that need no other's result begin in the opposite order, if they are sent together."""
    from phalanx.backends.ray.worker_actor import Turns

    come, numbers, waiting = Turns.come, itertools.count(), set[int]()

    async def out_of_order(self: Turns, refs: Sequence[Any]) -> None:
        if not refs:
            mine = next(numbers)
            waiting.add(mine)
            await asyncio.sleep(0.3)  # what was sent at about the same time is here by then
            while max(waiting) > mine:
                await asyncio.sleep(0.01)
            waiting.discard(mine)
        await come(self, refs)

    Turns.come = out_of_order


class Engine(px.Worker):
    """Accepts another network, asynchronously."""

    def __init__(self) -> None:
        last_comes_first()
        self.model = network(1)
        self.accept_weights(NAME, self.model)

    @px.register
    async def values(self) -> dict[str, torch.Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters()}


@pytest.fixture(scope="module")
def source(ray_cluster: None) -> Iterator[Any]:
    with px.ResourcePool([1], use_gpu=False) as pool:
        yield px.WorkerGroup(pool, Actor)


@pytest.fixture(scope="module")
def engine(ray_cluster: None) -> Iterator[Any]:
    with px.ResourcePool([2], use_gpu=False) as pool:
        yield px.WorkerGroup(pool, Engine, max_concurrency=16)


@pytest.mark.slow
def test_syncs_that_are_under_way_together_come_in_their_order(source: Any, engine: Any) -> None:
    with px.WeightSync(source, engine, NAME) as sync:
        sync()
        source.train()
        futures = [sync.submit(), sync.submit(), sync.submit()]
        numbers = [future.result(60).number for future in futures]

    assert numbers == sorted(set(numbers))
    (now,) = source.values()
    assert all(same(now, one) for one in engine.values())
