"""Saves as most do them by hand: each rank, a plain actor, calls ``torch.save`` for its part and syncs the file."""

from __future__ import annotations

import os
from pathlib import Path

import ray
import torch

from bench.contenders.saves import RANKS, SavedState, SaveRoles


class _Rank(SavedState):
    def __init__(self, megabytes: int, rank: int) -> None:
        super().__init__(megabytes, rank)
        self._rank = rank

    def save(self, folder: str) -> None:
        with open(f"{folder}/{self._rank}", "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: str) -> None:
        for name, tensor in torch.load(f"{folder}/{self._rank}").items():
            self.tensors[name].copy_(tensor)


class TorchRoles(SaveRoles):
    """Ranks as plain actors."""

    def __init__(self, megabytes: int) -> None:
        super().__init__(megabytes)
        made = ray.remote(num_cpus=1)(_Rank)
        self._ranks = [made.remote(megabytes, rank) for rank in range(RANKS)]

    def change(self, step: int) -> None:
        ray.get([one.change.remote(step) for one in self._ranks])

    def save(self, folder: Path) -> None:
        ray.get([one.save.remote(str(folder)) for one in self._ranks])

    def load(self, folder: Path) -> None:
        ray.get([one.load.remote(str(folder)) for one in self._ranks])

    def is_at(self, step: int) -> bool:
        return all(ray.get([one.is_at.remote(step) for one in self._ranks]))

    def close(self) -> None:
        for actor in self._ranks:
            ray.kill(actor)
