"""Syncs to asynchronous ranks, where Ray starts calls in any order: here, always the last call first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import NAME, Actor, network, same


def last_comes_first() -> Callable[[int], None]:
    """Start concurrent calls of this rank in reverse order, if they need no result of another call."""
    from phalanx.backends.ray.worker_actor import AsyncWorkerActor

    come, waiting = AsyncWorkerActor._px_come, set[int]()
    last = expected = 0

    async def out_of_order(self: AsyncWorkerActor, refs: Sequence[Any]) -> None:
        nonlocal last
        last = mine = last + 1
        if not refs:
            waiting.add(mine)
            while last < expected or max(waiting) > mine:
                await asyncio.sleep(0.01)
            waiting.discard(mine)
        await come(self, refs)

    def expect(calls: int) -> None:
        """Let the next calls wait until this number of calls has arrived."""
        nonlocal expected
        expected = last + calls

    for named in AsyncWorkerActor.__subclasses__():
        for actor_class in named.__subclasses__():  # to which Ray has copied the methods
            actor_class._px_come = out_of_order
    return expect


class Engine(px.Worker):
    """Accepts weights on an asynchronous rank."""

    def __init__(self) -> None:
        self.expect = last_comes_first()
        self.models = [network(1), network(2)]
        for name, model in zip((NAME, "other"), self.models, strict=True):
            self.accept_weights(name, model)

    @px.register
    async def values(self) -> list[dict[str, torch.Tensor]]:
        return [dict(model.named_parameters()) for model in self.models]


@pytest.mark.slow
def test_concurrent_syncs_of_two_names_are_applied_in_order(ray_cluster: None) -> None:
    with (
        px.ResourcePool([3], use_gpu=False) as pool,
        px.WorkerGroup(pool[0:1], Actor) as source,
        px.WorkerGroup(pool[1:3], Engine, max_concurrency=16) as engine,
        px.WeightSync(source, engine, NAME, timeout=30) as sync,
        px.WeightSync(source, engine, "other", source_name=NAME, timeout=30) as other,
    ):
        sync()
        other()
        engine.run(lambda worker: worker.expect(9))
        futures = [each.submit() for each in (source.train, sync, sync, other) * 3]
        numbers = [future.result(60).number for at, future in enumerate(futures) if at % 4]

        assert numbers == sorted(set(numbers))
        (now,) = source.values()
        assert all(same(now, one) for models in engine.values() for one in models)
