"""A checkpoint engine for machines without accelerators, by verl's own registry: weights through Ray's object store."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry


@ray.remote(num_cpus=0)
class Board:
    """An actor that stores the weights of an update."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] | None = None

    def put(self, weights: dict[str, torch.Tensor]) -> None:
        self.held = weights

    def get(self) -> dict[str, torch.Tensor] | None:
        return self.held


@CheckpointEngineRegistry.register("board")
class BoardEngine(CheckpointEngine):
    """A checkpoint engine from the trainer's rank 0 to all rollout ranks."""

    def __init__(self, bucket_size: int, is_master: bool = False, **kwargs: Any) -> None:
        self.is_master, self.board, self.kept = is_master, None, None

    def prepare(self) -> dict[str, str]:
        if not self.is_master:
            return {}
        name = f"board_{uuid.uuid4().hex}"
        self.kept = Board.options(name=name).remote()
        return {"name": name}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        name, senders = metadata[0]["name"], actor_wg_world_size
        return (
            {"rank": [0] + [-1] * (senders - 1), "name": [name] * senders},
            {"rank": list(range(1, rollout_world_size + 1)), "name": [name] * rollout_world_size},
        )

    def init_process_group(self, rank: int, name: str) -> None:
        self.rank, self.board = rank, ray.get_actor(name)

    def finalize(self) -> None:
        self.board = self.kept = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, int]:
        held = {name: tensor.detach().cpu() for name, tensor in weights}
        if self.rank == 0:
            await self.board.put.remote(held)
        return {"sync/tensors": len(held)}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while (held := await self.board.get.remote()) is None:
            await asyncio.sleep(0.05)
        for name, tensor in held.items():
            yield name, tensor
