"""Workers that form process groups and register meshes; rows split over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict

from phalanx.compat.verl import DataProto
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from phalanx.compat.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

pytestmark = pytest.mark.slow  # each rank imports torch.distributed and tensordict

OVER_TRAIN = make_nd_compute_dataproto_dispatch_fn(mesh_name="train")
OVER_INFER = make_nd_compute_dataproto_dispatch_fn(mesh_name="infer")


@ray.remote
class Sharded(Worker):
    """dp 2 x tp 2 for training; one dp rank of all four for inference."""

    def __init__(self) -> None:
        super().__init__()
        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        self.tp_group = mesh.get_group("tp")
        self._register_dispatch_collect_info("train", dp_rank=dp, is_collect=tp == 0)
        self._register_dispatch_collect_info("infer", dp_rank=0, is_collect=self.rank == 3)

    @register(OVER_TRAIN)
    def train(self, data: Any) -> Any:
        seen = data["a"] if isinstance(data, TensorDict) else data.batch["a"]
        torch.distributed.all_reduce(seen, group=self.tp_group)  # sums what the tp peers got
        return data

    @register(OVER_TRAIN, blocking=False)
    def train_later(self, data: DataProto) -> DataProto:
        data.batch["a"] += 1
        return data

    @register(OVER_INFER)
    def infer(self, data: DataProto) -> DataProto:
        data.batch["by"] = torch.full((len(data),), self.rank)
        return data

    @register(Dispatch.ONE_TO_ALL)
    def gather_ranks(self) -> list[int]:
        found = [torch.zeros(1) for _ in range(self.world_size)]
        torch.distributed.all_gather(found, torch.full((1,), float(self.rank)))
        return [int(one) for one in found]

    @register(Dispatch.ONE_TO_ALL)
    def sum_on_all(self, tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    @register(Dispatch.ONE_TO_ALL)
    def places(self) -> dict[str, dict[str, Any]]:
        return self.get_dispatch_collect()


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    made = RayWorkerGroup(RayResourcePool([4], use_gpu=False), RayClassWithInitArgs(Sharded))
    yield made
    for worker in made.workers:
        ray.kill(worker)


def rows(count: int, **options: Any) -> DataProto:
    return DataProto.from_dict({"a": torch.arange(count)}, **options)


def test_tp_peers_get_the_same_rows_and_dp_zero_of_tp_gives_them_back(group: RayWorkerGroup) -> None:
    assert group.train(rows(4)).batch["a"].tolist() == [0, 2, 4, 6]


def test_a_keyword_argument_alone(group: RayWorkerGroup) -> None:
    assert group.train(data=rows(2)).batch["a"].tolist() == [0, 2]


def test_tensordict_in_and_out(group: RayWorkerGroup) -> None:
    output = group.train(TensorDict({"a": torch.arange(4)}, [4]))

    assert isinstance(output, TensorDict)
    assert output["a"].tolist() == [0, 2, 4, 6]


def test_padding_over_dp(group: RayWorkerGroup) -> None:
    assert group.train(rows(3, auto_padding=True)).batch["a"].tolist() == [0, 2, 4]


def test_a_future_over_a_mesh(group: RayWorkerGroup) -> None:
    later = group.train_later(rows(4))

    assert group.train(later).batch["a"].tolist() == [2, 4, 6, 8]


def test_a_second_mesh_of_the_same_workers(group: RayWorkerGroup) -> None:
    assert group.infer(rows(3)).batch["by"].tolist() == [3, 3, 3]


def test_collectives_reach_all_ranks(group: RayWorkerGroup) -> None:
    assert group.gather_ranks() == [[0, 1, 2, 3]] * 4
    assert [one.tolist() for one in group.sum_on_all(torch.ones(2))] == [[4, 4]] * 4


def test_what_ranks_registered(group: RayWorkerGroup) -> None:
    assert [place["dispatch_dp_rank"]["train"] for place in group.places()] == [0, 0, 1, 1]


def test_a_mesh_of_a_role(ray_cluster: None) -> None:
    @ray.remote
    class Role(Worker):
        def __init__(self, reverse: bool) -> None:
            super().__init__()
            place = self.world_size - 1 - self.rank if reverse else self.rank
            self._register_dispatch_collect_info("train", dp_rank=place, is_collect=True)

        @register(OVER_TRAIN)
        def mark(self, data: DataProto) -> DataProto:
            data.batch["by"] = torch.full((len(data),), self.rank)
            return data

    roles = {"plain": RayClassWithInitArgs(Role, False), "reversed": RayClassWithInitArgs(Role, True)}
    whole = RayWorkerGroup(RayResourcePool([2], use_gpu=False), create_colocated_worker_cls(roles))
    groups = whole.spawn(roles)

    assert groups["plain"].mark(rows(2)).batch["a"].tolist() == [0, 1]
    assert groups["reversed"].mark(rows(2)).batch["a"].tolist() == [1, 0]
