"""Weights as most do it by hand: gathered on rank 0, put into the object store, fetched and cut by all targets."""

from __future__ import annotations

import numpy as np
import ray
import torch

from bench.contenders.weights import (
    COLUMNS,
    LAYOUTS,
    ROWS,
    WeightsRoles,
    is_at,
    names,
    source_tensors,
    target_tensors,
    train,
)

Arrays = dict[str, np.ndarray]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor: numpy has no bfloat16."""
    return tensor.view(torch.int16).numpy()


class Source:
    """A training rank."""

    def __init__(self, layout: str, megabytes: int, rank: int) -> None:
        self._layout, self._rank = LAYOUTS[layout], rank
        self._weights = source_tensors(layout, megabytes, rank)

    def train(self, step: int) -> None:
        train(self._weights, step)

    def shards(self) -> Arrays:
        return {name: _bits(tensor) for name, tensor in self._weights.items()}

    def gathered(self, *others: Arrays) -> Arrays:
        """Return complete tensors, joined from the ranks' parts."""
        if len(others) == 0:
            return self.shards()
        whole: Arrays = {}
        for name, mine in self.shards().items():
            parts = [mine, *(other[name] for other in others)]
            whole[name] = np.empty((ROWS, COLUMNS), mine.dtype)
            np.concatenate(parts, out=whole[name])
        return whole


class Target:
    """A generating rank."""

    def __init__(self, layout: str, megabytes: int, rank: int) -> None:
        self._layout, self._rank, self._names = LAYOUTS[layout], rank, names(megabytes)
        self._weights = target_tensors(layout, megabytes, rank)

    def load(self, whole: Arrays) -> None:
        for index, name in enumerate(self._names):
            part = self._layout.wanted(self._rank, index)
            _bits(self._weights[name])[:] = part.of(whole[name])  # type: ignore[arg-type]

    def is_at(self, step: int) -> bool:
        return is_at(self._weights, step)


class GatheredRoles(WeightsRoles):
    """Source and target as plain actors."""

    def __init__(self, layout: str, megabytes: int) -> None:
        super().__init__(layout, megabytes)
        chosen = LAYOUTS[layout]
        source, target = ray.remote(num_cpus=1)(Source), ray.remote(num_cpus=1)(Target)
        self._sources = [source.remote(layout, megabytes, rank) for rank in range(chosen.sources)]
        self._targets = [target.remote(layout, megabytes, rank) for rank in range(chosen.targets)]
        self._sharded = chosen.held(0).sizes != (ROWS, COLUMNS)

    def train(self, step: int) -> None:
        ray.get([one.train.remote(step) for one in self._sources])

    def sync(self, verify: str) -> None:
        others = [one.shards.remote() for one in self._sources[1:]] if self._sharded else []
        whole = self._sources[0].gathered.remote(*others)
        ray.get([one.load.remote(whole) for one in self._targets])

    def is_at(self, step: int) -> bool:
        return all(ray.get([one.is_at.remote(step) for one in self._targets]))

    def close(self) -> None:
        for actor in (*self._sources, *self._targets):
            ray.kill(actor)
