"""A bare Ray loop, as a careful user of Ray writes it by hand, without a library.

Tensors are sent as numpy arrays (Ray ships these out-of-band; a pickled tensor view would ship its whole
storage), a value for all ranks is put once, every shard has its own reference. A received array is a
read-only view of shared memory, so a worker that must write clones it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from ray.util.queue import Queue

from bench.contenders.base import Shard, item_of, make_items, timed_loop, touch, trim
from bench.contenders.gathered_weights import GatheredRoles
from bench.contenders.ray_based import RayContender
from bench.contenders.torch_saves import TorchRoles


class Worker:
    """A rank, with the methods that a user would write."""

    def __init__(self) -> None:
        self._shard = Shard()

    def ping(self) -> None:
        return None

    def pid(self) -> int:
        return os.getpid()

    def trim(self) -> None:
        trim()

    def take(self, _: bytes) -> None:
        return None

    def items(self, count: int) -> Iterator[np.ndarray]:
        yield from make_items(count)

    def touch(self, batch: np.ndarray) -> float:
        return touch(_private(batch))

    def look(self, batch: np.ndarray) -> float:
        return float(batch[:, 0].mean(dtype=np.float64))

    def pass_back(self, piece: np.ndarray) -> np.ndarray:
        mine = _private(piece)
        touch(mine)
        return mine.numpy()

    def produce(self, rows: int) -> np.ndarray:
        return self._shard.take(rows).numpy()

    def mean(self, piece: np.ndarray) -> float:
        return float(piece[:, 0].mean())

    def put_items(self, queue: Queue, kilobytes: int, items: int) -> None:
        item = item_of(kilobytes)
        for _ in range(items):
            queue.put(item)

    def get_items(self, queue: Queue, items: int) -> float:
        found = 0.0
        for _ in range(items):
            item = queue.get().clone()  # what is read from the store is shared
            item[0] += 1
            found += float(item[0])
        return found


def _private(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


class BareRay(RayContender):
    """`[a.f.remote() for a in actors]; ray.get(refs)`."""

    module_to_import = "ray"

    def spawn(self, ranks: int) -> list[Any]:
        actor_class = ray.remote(Worker)
        return [actor_class.options(num_cpus=1).remote() for _ in range(ranks)]

    def kill(self, group: list[Any]) -> None:
        for actor in group:
            ray.kill(actor)

    def pids(self, group: list[Any]) -> list[int]:
        return ray.get([actor.pid.remote() for actor in group])

    def trim(self, group: list[Any]) -> None:
        ray.get([actor.trim.remote() for actor in group])

    def ping(self, group: list[Any]) -> list[None]:
        return ray.get([actor.ping.remote() for actor in group])

    def pipeline(self, group: list[Any], calls: int) -> None:
        ray.get([actor.ping.remote() for _ in range(calls) for actor in group])

    def stream(self, group: list[Any], count: int, buffer: int | None) -> Iterator[np.ndarray]:
        options: dict[str, Any] = {"num_returns": "streaming"}
        if buffer is not None:
            options["_generator_backpressure_num_objects"] = buffer
        open_ones = [actor.items.options(**options).remote(count) for actor in group]
        while open_ones:
            for one in ray.wait(open_ones, num_returns=1, fetch_local=False)[0]:
                ref = next(one, None)  # pyright: ignore[reportArgumentType] a generator, which Ray's types do not tell
                if ref is None:
                    open_ones.remove(one)
                else:
                    yield np.array(ray.get(ref))  # writable, as the other's items are

    def wrap(self, batch: torch.Tensor) -> np.ndarray:
        return batch.numpy()

    def broadcast(self, group: list[Any], batch: np.ndarray) -> list[float]:
        shared = ray.put(batch)
        return ray.get([actor.touch.remote(shared) for actor in group])

    def broadcast_readonly(self, group: list[Any], batch: np.ndarray) -> list[float]:
        shared = ray.put(batch)
        return ray.get([actor.look.remote(shared) for actor in group])

    def split_gather(self, group: list[Any], batch: np.ndarray) -> torch.Tensor:
        pieces = np.array_split(batch, len(group))
        refs = [actor.pass_back.remote(ray.put(piece)) for actor, piece in zip(group, pieces, strict=True)]
        return torch.from_numpy(np.concatenate(ray.get(refs)))

    def chain(self, groups: list[Any], rows: int) -> list[float]:
        first, second, third = groups
        made = [actor.produce.remote(rows // len(first)) for actor in first]
        touched = [actor.pass_back.remote(ref) for actor, ref in zip(second, made, strict=True)]
        return ray.get([actor.mean.remote(ref) for actor, ref in zip(third, touched, strict=True)])

    def open_queue(self, items: int) -> Queue:
        queue = Queue(items, actor_options={"num_cpus": 0})
        queue.qsize()
        return queue

    def close_queue(self, queue: Queue) -> None:
        queue.shutdown()

    def flow(self, queue: Queue, groups: list[list[Any]], kilobytes: int, items: int) -> list[float]:
        producers, consumers = groups
        put = [actor.put_items.remote(queue, kilobytes, items) for actor in producers]
        got = ray.get([actor.get_items.remote(queue, items) for actor in consumers])
        ray.get(put)
        return got

    def saves(self, megabytes: int) -> TorchRoles:
        return TorchRoles(megabytes)

    def weights(self, layout: str, megabytes: int) -> GatheredRoles:
        return GatheredRoles(layout, megabytes)

    def do_threshold(self, group: str, kilobytes: int, variant: str, calls: int) -> float:
        """Return the median seconds to send `kilobytes` KiB to every rank: in each message, or put once."""
        actors, blob = self._groups[group], os.urandom(kilobytes << 10)

        def send() -> None:
            value = ray.put(blob) if variant == "put once" else blob
            ray.get([actor.take.remote(value) for actor in actors])

        return statistics.median(timed_loop(send, calls))


CONTENDER = BareRay
