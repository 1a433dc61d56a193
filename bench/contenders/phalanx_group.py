"""phalanx, as its guide shows it: ResourcePool, WorkerGroup, register, plain tensors as batches."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import phalanx as px
from bench.contenders.base import ROW_BYTES, Shard, check, item_of, make_items, timed, timed_loop, touch, trim
from bench.contenders.phalanx_saves import PhalanxSaves
from bench.contenders.phalanx_weights import PhalanxRoles
from bench.contenders.ray_based import RayContender


class PhalanxWorker(px.Worker):
    """A rank."""

    def __init__(self) -> None:
        super().__init__()
        self._shard = Shard()

    @px.register(px.Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        return None

    @px.register(px.Dispatch.ONE_TO_ALL)
    def trim(self) -> None:
        trim()

    @px.register(px.Dispatch.ONE_TO_ALL)
    def rest(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @px.register(px.Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()

    @px.register(px.Dispatch.ONE_TO_ALL)
    def touch(self, batch: torch.Tensor) -> float:
        return touch(batch)

    @px.register(px.Dispatch.ONE_TO_ALL, readonly=True)
    def look(self, batch: torch.Tensor) -> float:
        return float(batch[:, 0].double().mean())

    @px.register(px.Dispatch.ONE_TO_ALL)
    def items(self, count: int) -> Iterator[np.ndarray]:
        yield from make_items(count)

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def pass_back(self, piece: torch.Tensor) -> torch.Tensor:
        touch(piece)
        return piece

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def produce(self, wanted: torch.Tensor) -> torch.Tensor:
        return self._shard.take(int(wanted.sum()))

    @px.register(px.Dispatch.DP_COMPUTE_METRIC, readonly=True)
    def mean(self, piece: torch.Tensor) -> float:
        return float(piece[:, 0].mean())

    @px.register(px.Dispatch.ONE_TO_ALL)
    def put_items(self, channel: px.Channel, kilobytes: int, items: int) -> None:
        item = item_of(kilobytes)
        for _ in range(items):
            channel.put(item)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def get_items(self, channel: px.Channel, items: int) -> float:
        found = 0.0
        for _ in range(items):
            item = channel.get()
            item[0] += 1
            found += float(item[0])
        return found


@dataclass(frozen=True)
class Ranks:
    """The part of a group that planning a call without a mesh needs."""

    world_size: int

    def mesh(self, name: str = "default") -> px.Mesh:
        raise px.DispatchError(f"no mesh {name!r}: the planning benchmark has none")


@dataclass(frozen=True)
class Pooled:
    """A group and its own pool."""

    pool: Any
    group: Any


class Phalanx(RayContender):
    """Groups of PhalanxWorker."""

    module_to_import = "phalanx"

    def spawn(self, ranks: int) -> Pooled:
        pool = px.ResourcePool([ranks], use_gpu=False)
        return Pooled(pool, px.WorkerGroup(pool, PhalanxWorker))

    def kill(self, group: Pooled) -> None:
        group.pool.close()

    def pids(self, group: Pooled) -> list[int]:
        return group.group.process()

    def trim(self, group: Pooled) -> None:
        group.group.trim()

    def ping(self, group: Pooled) -> list[None]:
        return group.group.empty()

    def pipeline(self, group: Pooled, calls: int) -> None:
        px.gather(*[group.group.empty.submit() for _ in range(calls)])

    def wrap(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def stream(self, group: Pooled, count: int, buffer: int | None) -> Iterator[np.ndarray]:
        return (item for _, item in group.group.items.stream(count, buffer=buffer))

    def broadcast(self, group: Pooled, batch: torch.Tensor) -> list[float]:
        return group.group.touch(batch)

    def broadcast_readonly(self, group: Pooled, batch: torch.Tensor) -> list[float]:
        return group.group.look(batch)

    def split_gather(self, group: Pooled, batch: torch.Tensor) -> torch.Tensor:
        return group.group.pass_back(batch)

    def chain(self, groups: list[Pooled], rows: int) -> list[float]:
        first, second, third = (pooled.group for pooled in groups)
        wanted = torch.full((first.world_size,), rows // first.world_size)
        made = first.produce.submit(wanted)
        return third.mean(second.pass_back.submit(made))

    def open_queue(self, items: int) -> px.Channel:
        return px.Channel(items)

    def close_queue(self, queue: px.Channel) -> None:
        queue.close()

    def flow(self, queue: px.Channel, groups: list[Pooled], kilobytes: int, items: int) -> list[float]:
        producers, consumers = (pooled.group for pooled in groups)
        put = producers.put_items.submit(queue, kilobytes, items)
        got = consumers.get_items(queue, items)
        put.result()
        return got

    def saves(self, megabytes: int) -> PhalanxSaves:
        return PhalanxSaves(megabytes)

    def weights(self, layout: str, megabytes: int) -> PhalanxRoles:
        return PhalanxRoles(layout, megabytes)

    def do_planning(self, ranks: int, mode: str) -> float:
        """Return the seconds to plan a call on `ranks` ranks, without any of them: 4 KB rows, two per rank."""
        from phalanx.declare.classes import registered_methods
        from phalanx.dispatch.modes import plan

        name = {"ONE_TO_ALL": "touch", "DP_COMPUTE_PROTO": "pass_back"}[mode]
        spec, target = registered_methods(PhalanxWorker)[name], Ranks(ranks)
        batch = torch.zeros(2 * ranks, ROW_BYTES // 4)
        seconds, _ = timed(lambda: plan(spec, target, (batch,), {}))
        return seconds

    def do_rest(self, group: str, seconds: float, calls: int, traced: bool = True) -> float:
        """Return the median seconds of a call in which each rank rests, with or without a trace."""
        made = self._groups[group].group
        with px.trace() if traced else contextlib.nullcontext() as trace:
            found = statistics.median(timed_loop(lambda: made.rest(seconds), calls))
        if trace is not None:
            parts = [part for call in trace.events.calls for part in call.parts]
            whole = len(parts) == calls * made.world_size and all(part.returned for part in parts)
            check(whole, f"the trace has {len(parts)} parts of {calls} calls")
        return found

    def counters(self) -> dict[str, int]:
        """Return phalanx's counters, summed over the groups."""
        total: dict[str, int] = {}
        for pooled in self._groups.values():
            for name, count in pooled.group.statistics().items():
                total[name] = total.get(name, 0) + count
        return total


CONTENDER = Phalanx
