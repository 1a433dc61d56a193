# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportUntypedBaseClass=false
"""verl 0.9.1, as its own trainers use it: RayResourcePool, RayWorkerGroup, register, DataProto.

Batches are DataProto, the only value that its row modes take. Pools ask for one CPU per bundle and no GPU,
the cheapest that it offers.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import torch
from verl.experimental.fully_async_policy.message_queue import MessageQueue, MessageQueueClient
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from bench.contenders.base import Shard, item_of, touch, trim
from bench.contenders.ray_based import RayContender
from bench.contenders.verl_weights import VerlRoles

SERIALIZATION = "VERL_DATAPROTO_SERIALIZATION_METHOD"
"""verl reads the variable at every pickling of a DataProto: unset by default, or "numpy", its faster way."""


class VerlWorker(Worker):
    """A rank."""

    def __init__(self) -> None:
        super().__init__()
        self._shard = Shard()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def ping_later(self) -> None:
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trim(self) -> None:
        trim()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialize_by(self, method: str) -> None:
        os.environ[SERIALIZATION] = method

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def touch(self, batch: DataProto) -> float:
        return touch(batch.batch["x"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def pass_back(self, piece: DataProto) -> DataProto:
        touch(piece.batch["x"])
        return piece

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce(self, wanted: DataProto) -> DataProto:
        return DataProto.from_dict({"x": self._shard.take(int(wanted.batch["rows"].sum()))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def pass_on(self, piece: DataProto) -> DataProto:
        touch(piece.batch["x"])
        return piece

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def mean(self, piece: DataProto) -> float:
        return float(piece.batch["x"][:, 0].mean())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def put_items(self, queue: Any, kilobytes: int, items: int) -> None:
        client, item = MessageQueueClient(queue), item_of(kilobytes)

        async def put() -> None:
            for _ in range(items):
                await client.put_sample(ray.cloudpickle.dumps(item))  # as its rollouter does

        asyncio.run(put())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_items(self, queue: Any, items: int) -> float:
        client, found = MessageQueueClient(queue), 0.0
        for _ in range(items):
            item = ray.cloudpickle.loads(client.get_sample_sync()[0])
            item[0] += 1
            found += float(item[0])
        return found


class Verl(RayContender):
    """Groups of VerlWorker."""

    module_to_import = "verl.single_controller.ray"

    def do_connect(self) -> dict[str, str]:
        from importlib.metadata import version

        return {**super().do_connect(), "verl": version("verl"), "tensordict": version("tensordict")}

    def spawn(self, ranks: int) -> RayWorkerGroup:
        pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
        wrapped = RayClassWithInitArgs(ray.remote(VerlWorker))
        return RayWorkerGroup(pool, wrapped, device_name="cpu")

    def kill(self, group: RayWorkerGroup) -> None:
        """Kill the group's actors, as users of verl do: verl has no shutdown."""
        for worker in group.workers:
            ray.kill(worker)
        for placement_group in group.resource_pool.pgs:
            ray.util.remove_placement_group(placement_group)

    def pids(self, group: Any) -> list[int]:
        return group.pid()

    def trim(self, group: Any) -> None:
        group.trim()

    def ping(self, group: Any) -> list[None]:
        return group.ping()

    def pipeline(self, group: Any, calls: int) -> None:
        ray.get([ref for refs in [group.ping_later() for _ in range(calls)] for ref in refs])

    def wrap(self, batch: torch.Tensor) -> DataProto:
        return DataProto.from_dict({"x": batch})

    def do_broadcast(self, group: str, megabytes: int, serialization: str = "") -> float:
        self._serialize_by([group], serialization)
        return super().do_broadcast(group, megabytes)

    def do_split_gather(self, group: str, megabytes: int, serialization: str = "") -> float:
        self._serialize_by([group], serialization)
        return super().do_split_gather(group, megabytes)

    def do_chain(self, groups: list[str], megabytes: int, serialization: str = "") -> float:
        self._serialize_by(groups, serialization)
        return super().do_chain(groups, megabytes)

    def open_queue(self, items: int) -> Any:
        queue = MessageQueue.options(num_cpus=0).remote(None, items)  # of more it drops the oldest
        ray.get(queue.get_queue_size.remote())
        return queue

    def close_queue(self, queue: Any) -> None:
        ray.kill(queue)

    def flow(self, queue: Any, groups: list[Any], kilobytes: int, items: int) -> list[float]:
        producers, consumers = groups
        put = producers.put_items(queue, kilobytes, items)
        got = consumers.get_items(queue, items)
        ray.get(put)
        return got

    def _serialize_by(self, groups: list[str], method: str) -> None:
        os.environ[SERIALIZATION] = method
        for name in groups:
            self._groups[name].serialize_by(method)

    def broadcast(self, group: Any, batch: DataProto) -> list[float]:
        return group.touch(batch)

    def split_gather(self, group: Any, batch: DataProto) -> torch.Tensor:
        return group.pass_back(batch).batch["x"]

    def weights(self, layout: str, megabytes: int) -> VerlRoles:
        return VerlRoles(layout, megabytes)

    def chain(self, groups: list[Any], rows: int) -> list[float]:
        first, second, third = groups
        ranks = first.world_size
        wanted = DataProto.from_dict({"rows": torch.full((ranks,), rows // ranks)})
        return third.mean(second.pass_on(first.produce(wanted)))


CONTENDER = Verl
