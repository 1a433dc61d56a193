# pyright: reportMissingImports=false
"""Weights by verl's own sender over shared memory, which sends complete tensors from rank to rank."""

from __future__ import annotations

import asyncio
import importlib.util
import uuid
from pathlib import Path
from typing import Any

import ray
import torch

from bench.contenders.weights import WeightsRoles, is_at, names, source_tensors, target_tensors, train

BUCKET_MB = 512


def _transfer() -> Any:
    """Return verl's module of sender and receiver, loaded alone: its package imports vLLM, which it does not need."""
    import verl

    path = Path(verl.__file__).parent / "workers/rollout/vllm_rollout/bucketed_weight_transfer.py"
    spec: Any = importlib.util.spec_from_file_location("bucketed_weight_transfer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Source:
    """A training rank."""

    def __init__(self, layout: str, megabytes: int, rank: int) -> None:
        self._weights = source_tensors(layout, megabytes, rank)

    def train(self, step: int) -> None:
        train(self._weights, step)

    def send(self, handle: str) -> None:
        sender = _transfer().BucketedWeightSender(handle, BUCKET_MB, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(self._weights.items())))


class Target:
    """A generating rank."""

    def __init__(self, layout: str, megabytes: int, rank: int) -> None:
        self._names = names(megabytes)
        self._weights = target_tensors(layout, megabytes, rank)

    def receive(self, handle: str) -> None:
        _transfer().BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True).receive_weights(
            self._load
        )

    def _load(self, weights: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        for name, tensor in weights:
            self._weights[name].copy_(tensor)

    def is_at(self, step: int) -> bool:
        return is_at(self._weights, step)


class VerlRoles(WeightsRoles):
    """A sender next to each receiver, as verl places them. The gathering of sharded sources is left out."""

    def __init__(self, layout: str, megabytes: int) -> None:
        super().__init__(layout, megabytes)
        source, target = ray.remote(num_cpus=1)(Source), ray.remote(num_cpus=1)(Target)
        self._sources: list[Any] = [source.remote(layout, megabytes, rank) for rank in range(2)]
        self._targets: list[Any] = [target.remote(layout, megabytes, rank) for rank in range(2)]

    def train(self, step: int) -> None:
        ray.get([one.train.remote(step) for one in self._sources])

    def sync(self, verify: str) -> None:
        handles = [f"ipc:///tmp/bench-weights-{uuid.uuid4().hex}.sock" for _ in self._sources]
        pairs = zip(self._sources, self._targets, handles, strict=True)
        ray.get([ref for s, t, handle in pairs for ref in (s.send.remote(handle), t.receive.remote(handle))])

    def is_at(self, step: int) -> bool:
        return all(ray.get([one.is_at.remote(step) for one in self._targets]))

    def close(self) -> None:
        for actor in (*self._sources, *self._targets):
            ray.kill(actor)
