"""Batches in an order independent of random ids, by verl's hook `trainer.v1.sampler.custom_sampler`."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedReplayBuffer(ReplayBuffer):
    """verl's buffer, with batches sorted by their prompts and responses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("train_batch_size", 8)
        kwargs.setdefault("gen_batch_size", 8)
        super().__init__(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        batch, metrics = super().sample(*args, **kwargs)
        fields = ["prompts", "responses"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        columns = [[row.tolist() for row in data[name].unbind()] for name in fields]
        rows = list(zip(*columns, strict=True))
        batch.reorder(sorted(range(len(rows)), key=rows.__getitem__))
        return batch, metrics
