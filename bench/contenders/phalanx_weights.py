"""Weights by ``px.WeightSync``."""

from __future__ import annotations

from typing import Literal

import phalanx as px
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

Verify = Literal["sampled", "full", "off"]


class Source(px.Worker):
    """A training rank."""

    def __init__(self, layout: str, megabytes: int) -> None:
        self.weights = source_tensors(layout, megabytes, self.rank)
        part = LAYOUTS[layout].held(self.rank)
        boxes = {name: px.weights.ShardSpec((ROWS, COLUMNS), (part,)) for name in self.weights}
        self.publish_weights("policy", self.weights, boxes=boxes)

    @px.register
    def train(self, step: int) -> None:
        train(self.weights, step)


class Target(px.Worker):
    """A generating rank."""

    def __init__(self, layout: str, megabytes: int) -> None:
        self.weights = target_tensors(layout, megabytes, self.rank)
        wanted = [LAYOUTS[layout].wanted(self.rank, index) for index in range(len(self.weights))]
        boxes = {
            name: px.weights.ShardSpec((ROWS, COLUMNS), (part,))
            for name, part in zip(names(megabytes), wanted, strict=True)
        }
        self.accept_weights("policy", self.weights, boxes=boxes)

    @px.register
    def is_at(self, step: int) -> bool:
        return is_at(self.weights, step)


class PhalanxRoles(WeightsRoles):
    """Two groups, and the sync between them."""

    def __init__(self, layout: str, megabytes: int) -> None:
        super().__init__(layout, megabytes)
        chosen = LAYOUTS[layout]
        self._pools = [px.ResourcePool([ranks], use_gpu=False) for ranks in (chosen.sources, chosen.targets)]
        self._source = px.WorkerGroup(self._pools[0], Source.bind(layout, megabytes))
        self._target = px.WorkerGroup(self._pools[1], Target.bind(layout, megabytes))
        self._sync = px.WeightSync(self._source, self._target, "policy")

    def train(self, step: int) -> None:
        self._source.train(step)

    def sync(self, verify: Verify) -> None:
        self._sync(verify=verify)

    def is_at(self, step: int) -> bool:
        return all(self._target.is_at(step))

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
