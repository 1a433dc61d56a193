"""Saves by ``px.save``."""

from __future__ import annotations

from pathlib import Path

import phalanx as px
from bench.contenders.saves import RANKS, SavedState, SaveRoles
from bench.contenders.weights import COLUMNS, LAYOUTS, ROWS, SHARDED


class Trainer(px.Worker):
    """A training rank."""

    def __init__(self, megabytes: int) -> None:
        self.state = SavedState(megabytes, self.rank)
        part = LAYOUTS[SHARDED].held(self.rank)
        boxes = {name: px.weights.ShardSpec((ROWS, COLUMNS), (part,)) for name in self.state.tensors}
        px.register_state(self, model=self.state.tensors, boxes=boxes, rng=False)

    @px.register
    def change(self, step: int) -> None:
        self.state.change(step)

    @px.register
    def is_at(self, step: int) -> bool:
        return self.state.is_at(step)

    @px.register
    def work(self) -> float:
        return self.state.work()


class PhalanxSaves(SaveRoles):
    """A group that saves by ``px.save``."""

    def __init__(self, megabytes: int) -> None:
        super().__init__(megabytes)
        self._pool = px.ResourcePool([RANKS], use_gpu=False)
        self._group = px.WorkerGroup(self._pool, Trainer.bind(megabytes))
        self._begun: px.checkpoint.SaveFuture[px.checkpoint.CheckpointInfo] | None = None

    def change(self, step: int) -> None:
        self._group.change(step)

    def save(self, folder: Path) -> None:
        px.save(self._group, folder)

    def begin(self, folder: Path) -> None:
        self._begun = px.save.submit(self._group, folder)

    def end(self) -> None:
        if self._begun is not None:
            self._begun.result()

    def work(self) -> None:
        self._group.work()

    def load(self, folder: Path) -> None:
        px.load(self._group, folder)

    def is_at(self, step: int) -> bool:
        return all(self._group.is_at(step))

    def close(self) -> None:
        self._pool.close()
