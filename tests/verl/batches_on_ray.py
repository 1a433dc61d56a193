"""verl's own batches through every dispatch mode; writes the error of each case, or "", as JSON.

Run by ``phalanx verl`` in verl's environment. Four ranks: dp 2 x tp 2 for the mesh.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from tensordict import TensorDict
from transfer_queue import BatchMeta
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.base.worker import DistRankInfo
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)

import phalanx as px

OVER_DP = make_nd_compute_dataproto_dispatch_fn(mesh_name="dp")


def rows(count: int, **options: Any) -> DataProto:
    names = np.array([f"row {i}" for i in range(count)], dtype=object)
    return DataProto.from_dict({"a": torch.arange(count)}, {"name": names}, **options)


def padded(count: int) -> DataProto:
    return rows(count, auto_padding=True)


def values(data: Any) -> list[int]:
    if isinstance(data, DataProto):
        assert data.non_tensor_batch["name"].tolist() == [f"row {i}" for i in range(len(data))]
    return (data if isinstance(data, TensorDict) else data.batch)["a"].tolist()


def added(count: int, size: int, *, each: int = 1) -> list[int]:
    """The rows after each rank has added ``each`` times its number to its ``size`` rows."""
    return [row + each * (row // size) for row in range(count)]


def raised(kind: type[Exception], call: Callable[..., Any], *arguments: Any) -> Exception:
    try:
        call(*arguments)
    except kind as error:
        return error
    raise RuntimeError(f"{call} raised no {kind.__name__}")


class Adder(Worker):
    """Every method adds the rank (over dp: the dp rank) to its rows."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("dp", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    def _add(self, data: Any, number: int) -> Any:
        (data if isinstance(data, TensorDict) else data.batch)["a"] += number
        return data

    @register(Dispatch.DP_COMPUTE_PROTO)
    def split(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def split_async(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def split_later(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank)

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def split_for(self, function: Callable[..., Any], data: DataProto) -> DataProto:
        return function(self, data)

    @register(OVER_DP)
    def mesh(self, data: Any) -> Any:
        return self._add(data, self.rank // 2)

    @register(OVER_DP, blocking=False)
    def mesh_later(self, data: Any) -> Any:
        return self._add(data, self.rank // 2)

    @register(OVER_DP, blocking=False)
    def fail_later(self, data: DataProto) -> DataProto:
        if self.rank == 1:  # its output would not be collected
            if data.meta_info["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("weights")
        time.sleep(60.0)  # like a collective with a lost rank
        return data

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def metrics(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"rank": self.rank, "rows": len(data)}})

    @register(Dispatch.ONE_TO_ALL)
    def to_all(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank)

    @register(Dispatch.ALL_TO_ALL)
    def dealt(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank)

    @register(Dispatch.DP_COMPUTE)
    def computed(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank)

    @register(Dispatch.RANK_ZERO)
    def on_zero(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank + 10)

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def executed_on_zero(self, data: DataProto) -> DataProto:
        return self._add(data, self.rank + 10)


def case_rows_are_split_and_joined_in_order(group: Any) -> None:
    data = rows(8)
    assert values(group.split(data)) == added(8, 2)
    assert values(data) == list(range(8))
    assert values(group.split_async(data)) == added(8, 2)
    assert values(group.mesh(data)) == added(8, 4)


def case_rows_that_do_not_divide_need_padding(group: Any) -> None:
    raised(AssertionError, group.split, rows(3))
    raised(AssertionError, group.mesh, rows(3))


def case_padding_is_added_and_removed(group: Any) -> None:
    for count, size in ((1, 1), (3, 1), (5, 2), (9, 3)):
        data = padded(count)
        assert values(group.split(data=data)) == added(count, size)
        assert len(data) == count
    for count in (3, 5):
        assert values(group.mesh(padded(count))) == added(count, (count + 1) // 2)
    [shards], _ = OVER_DP["dispatch_fn"](group, padded(3))
    assert [len(shard) for shard in shards] == [2, 2, 1, 1]  # a mesh splits unevenly


def case_a_list_by_rank_is_not_shortened(group: Any) -> None:
    assert group.count(rows(4)) == [1] * 4
    assert group.count(padded(5)) == [2] * 4


def case_metrics_are_joined(group: Any) -> None:
    assert group.metrics(rows(8)).meta_info["metrics"] == {"rank": [0, 1, 2, 3], "rows": [2] * 4}


def case_every_rank_gets_all_rows(group: Any) -> None:
    assert [values(one) for one in group.to_all(rows(3))] == [
        [i + rank for i in range(3)] for rank in range(4)
    ]


def case_lists_are_dealt(group: Any) -> None:
    for method in (group.dealt, group.computed):
        outputs = method([rows(count) for count in (1, 2, 3, 4)])
        assert [values(one) for one in outputs] == [[i + rank for i in range(rank + 1)] for rank in range(4)]


def case_rank_zero_alone(group: Any) -> None:
    assert values(group.on_zero(rows(2))) == [10, 11]
    assert values(group.executed_on_zero(rows(3))) == [10, 11, 12]


def case_a_function_goes_to_all_and_rows_are_split(group: Any) -> None:
    def mark(worker: Any, data: Any) -> Any:
        data.batch["a"] += worker.rank
        return data

    assert values(group.split_for(mark, rows(8))) == added(8, 2)
    assert values(group.split_for(mark, padded(7))) == added(7, 2)
    dispatch = DISPATCH_MODE_FN_REGISTRY[Dispatch.DP_COMPUTE_PROTO_WITH_FUNC]["dispatch_fn"]
    [_, shards], _ = dispatch(group, mark, padded(7))
    assert [len(shard) for shard in shards] == [2, 2, 2, 1]  # not padded, as in verl


def case_futures_are_values_and_arguments(group: Any) -> None:
    future = group.split_later(rows(8))
    assert isinstance(future, DataProtoFuture)
    assert values(future.get()) == added(8, 2)
    assert values(group.split(future)) == added(8, 2, each=2)
    assert values(group.split_async(data=group.split_later(rows(8)))) == added(8, 2, each=2)
    assert values(group.mesh(group.mesh_later(rows(8)))) == added(8, 4, each=2)
    assert [values(one) for one in group.to_all(group.mesh_later(rows(2)))] == [
        [rank, rank + 2] for rank in range(4)
    ]


def case_futures_of_uneven_rows_are_split(group: Any) -> None:
    # the dp ranks add 0 and 1, the four ranks get 2, 2, 1, 1 rows
    output = group.split(group.mesh_later(rows(6)))
    assert values(output) == [0, 1, 2 + 1, 3 + 1 + 1, 4 + 1 + 2, 5 + 1 + 3]


def case_futures_are_joined_without_padding(group: Any) -> None:
    assert values(group.split_later(padded(5)).get()) == added(5, 2)
    assert values(group.mesh_later(padded(3)).get()) == added(3, 2)
    chained = group.mesh(group.split_later(padded(5)))  # five rows: three and two
    assert values(chained) == [0, 1, 2 + 1, 3 + 1 + 1, 4 + 2 + 1]


def case_tensordicts_pass(group: Any) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(i) for i in range(4)], layout=torch.jagged)
    data = TensorDict({"a": torch.arange(4), "jagged": jagged}, [4])
    assert group.count(data) == [1] * 4
    assert values(group.mesh(data)) == added(4, 2)
    assert values(group.mesh(group.mesh_later(data))) == added(4, 2, each=2)


def case_a_group_in_a_task_takes_rows(group: Any) -> None:
    @ray.remote(num_cpus=0)
    def call(given: Any) -> Any:
        return values(given.split(rows(4))), values(given.split_later(padded(3)).get())

    assert ray.get(call.remote(group)) == (added(4, 1), added(3, 1))


def case_a_role_takes_rows(group: Any) -> None:
    cls = create_colocated_worker_cls({"adder": RayClassWithInitArgs(ray.remote(Adder))})
    role = RayWorkerGroup(RayResourcePool([2], use_gpu=False), cls).spawn({"adder"})["adder"]
    assert values(role.split(rows(4))) == added(4, 2)
    assert values(role.split_later(padded(3)).get()) == added(3, 2)


def case_megatron_modes_split_over_dp(group: Any) -> None:
    infos = [DistRankInfo(tp_rank=t, dp_rank=d, pp_rank=0, cp_rank=0) for d in range(2) for t in range(2)]
    ranks = SimpleNamespace(
        world_size=4, dp_size=2, pp_size=1, get_megatron_rank_info=lambda rank: infos[rank]
    )
    functions = DISPATCH_MODE_FN_REGISTRY[Dispatch.MEGATRON_COMPUTE_PROTO]
    [shards], _ = functions["dispatch_fn"](ranks, rows(4))
    assert [len(shard) for shard in shards] == [2] * 4
    assert values(functions["collect_fn"](ranks, shards)) == [0, 1, 2, 3]


def case_arguments_that_do_not_fit_are_refused(group: Any) -> None:
    functions = DISPATCH_MODE_FN_REGISTRY[Dispatch.DP_COMPUTE_PROTO]
    refused = [
        *((group.split, value) for value in (3, "text", torch.zeros(4))),
        (group.split_later, [rows(4)]),
        (group.split_for, rows(4)),
        (group.split_for, len, rows(4)),
        (group.split_for, lambda worker, data: data, 5),
        (functions["collect_fn"], group, [1] * 4),
        (functions["dispatch_fn"], group, padded(3), padded(5)),
    ]
    for call, *arguments in refused:
        assert isinstance(raised(px.DispatchError, call, *arguments), AssertionError), (call, arguments)


class Native(px.Worker):
    """The library's own worker, on two ranks."""

    @px.register(px.Dispatch.ROWS)
    def split(self, data: Any) -> Any:
        if not isinstance(data, BatchMeta):
            (data if isinstance(data, TensorDict) else data.batch)["a"] += self.rank
        return data

    @px.register(px.Dispatch.ROWS, pad_to_multiple=3)
    def count(self, data: Any) -> list[int]:
        return [len(data)]


def case_native_groups_split_verls_batches(group: Any) -> None:
    with px.ResourcePool([2], backend="inline") as pool, px.WorkerGroup(pool, Native) as native:
        assert values(native.split(rows(5))) == added(5, 3)
        assert values(native.split(native.split.submit(rows(5)))) == added(5, 3, each=2)
        assert values(native.split(TensorDict({"a": torch.arange(3)}, [3]))) == added(3, 2)
        assert native.count(rows(4)) == [3, 3]
        meta = BatchMeta(global_indexes=list(range(5)), partition_ids=["train"] * 5, extra_info={"k": 1})
        output = native.split(meta)
        assert (output.global_indexes, output.extra_info) == (list(range(5)), {"k": 1})


def case_a_failed_or_lost_rank_is_the_one_error_of_a_future(group: Any) -> None:
    for kill, error in ((False, KeyError), (True, px.WorkerDiedError)):
        pool = RayResourcePool([2], use_gpu=False)
        workers = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Adder)))
        workers.mesh(rows(2))  # asks which ranks are collected
        future = workers.fail_later(rows(2, meta_info={"kill": kill}))
        # its call is tracked by this process alone
        assert type(pickle.loads(pickle.dumps(future))) is DataProtoFuture
        assert "rank 1" in str(raised(error, future.get))
    assert "Create it again" in str(raised(px.GroupBroken, workers.split, rows(2)))


def error_of(case: Any, group: Any) -> str:
    try:
        case(group)
    except BaseException:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    pool = RayResourcePool([4], use_gpu=False)
    workers = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Adder)), name_prefix="adder")
    cases = {name: case for name, case in globals().items() if name.startswith("case_")}
    Path(sys.argv[1]).write_text(json.dumps({name: error_of(case, workers) for name, case in cases.items()}))
