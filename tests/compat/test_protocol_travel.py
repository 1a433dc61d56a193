"""DataProto on its way: through pickle, the codec, groups of this library, process groups, Ray references."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import phalanx as px
from phalanx.compat.verl.protocol import (
    DataProto,
    DataProtoFuture,
    all_gather_data_proto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from phalanx.compat.verl.utils.tensordict_utils import get_tensordict
from phalanx.wire.codec import decode, encode


def batch(rows: int = 4, **meta: Any) -> DataProto:
    return DataProto.from_dict(
        {"a": torch.arange(rows), "half": torch.ones(rows, 2, dtype=torch.bfloat16)},
        {"b": [{"row": i} for i in range(rows)]},
        meta,
    )


def ragged() -> DataProto:
    rows = [torch.arange(2.0), torch.arange(5.0)]
    return DataProto(TensorDict({"ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [2]))


def same(one: DataProto, other: DataProto) -> bool:
    assert (one.batch is None) == (other.batch is None)
    if one.batch is not None:
        rows = [(one.batch[key].unbind(), other.batch[key].unbind()) for key in one.batch.keys()]  # noqa: SIM118
        assert all(torch.equal(a, b) for ours, theirs in rows for a, b in zip(ours, theirs, strict=True))
    columns = {key: value.tolist() for key, value in one.non_tensor_batch.items()}
    return (
        columns == {k: v.tolist() for k, v in other.non_tensor_batch.items()}
        and one.meta_info == other.meta_info
    )


@pytest.mark.parametrize("method", ["", "numpy"])
@pytest.mark.parametrize("make", [batch, ragged, DataProto, lambda: batch()[1:3], lambda: batch()[0:0]])
def test_pickling_keeps_everything(make: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    data = make()

    assert same(pickle.loads(pickle.dumps(data)), data)


def test_a_slice_is_pickled_with_its_own_bytes_only() -> None:
    data = DataProto.from_dict({"a": torch.zeros(100_000)})

    assert len(pickle.dumps(data[:10])) < 20_000


def test_a_slice_of_nested_tensors_is_pickled_with_its_own_bytes_only() -> None:
    long = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(100_000)], layout=torch.jagged)
    data = DataProto(TensorDict({"a": long}, [2]))

    assert len(pickle.dumps(data[:1])) < 20_000


def test_pickling_does_not_change_the_batch() -> None:
    data = batch()[1:3]
    before = data.batch["a"].data_ptr()

    pickle.dumps(data)

    assert data.batch["a"].data_ptr() == before


def test_what_verl_itself_pickled_can_be_read() -> None:
    sink = io.BytesIO()
    torch.save(TensorDict({"a": torch.arange(3)}, [3]), sink)
    data = DataProto.__new__(DataProto)

    data.__setstate__((sink.getvalue(), {"b": np.arange(3)}, {"m": 1}))

    assert (data.batch["a"].tolist(), data.meta_info) == ([0, 1, 2], {"m": 1})


def test_pickles_name_the_public_module() -> None:
    assert b"phalanx.compat.verl.protocol" in pickle.dumps(batch(), 0)


def test_files_keep_everything(tmp_path: Path) -> None:
    data = batch(m=1)

    data.save_to_disk(tmp_path / "batch")

    assert same(DataProto.load_from_disk(tmp_path / "batch"), data)


def test_a_deep_copy_shares_nothing() -> None:
    data = batch(m=[1])

    copied = copy.deepcopy(data)
    copied.batch["a"][0] = 9
    copied.meta_info["m"].append(2)

    assert (data.batch["a"][0].item(), data.meta_info["m"]) == (0, [1])


def test_the_codec_sends_a_slice_with_its_own_bytes_and_gives_private_memory() -> None:
    data = DataProto.from_dict({"a": torch.zeros(100_000)})[:10]

    encoded = encode(data)
    decoded = decode(encoded)
    decoded.batch["a"] += 1

    assert encoded.nbytes < 20_000
    assert data.batch["a"].sum() == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(2, requires_grad=True),
    ],
    ids=str,
)
def test_a_single_tensor_there_and_back(tensor: torch.Tensor) -> None:
    again = deserialize_single_tensor(serialize_single_tensor(tensor))

    assert again.dtype is tensor.dtype
    assert torch.equal(again, tensor)


def test_a_tensordict_there_and_back() -> None:
    positions = [torch.arange(6).reshape(3, 2), torch.arange(12).reshape(3, 4)]
    given = get_tensordict(
        {
            "a": torch.arange(2),
            "b": ["x", "y"],
            "p": torch.nested.as_nested_tensor(positions, layout=torch.jagged),
        },
        {"k": {"v": 1}},
    )

    again = deserialize_tensordict(serialize_tensordict(given))

    assert (again.get("b").tolist(), again.get("k").data, list(again.batch_size)) == (
        ["x", "y"],
        {"v": 1},
        [2],
    )
    assert [row.shape for row in again["p"].unbind()] == [row.shape for row in positions]


class Doubler(px.Worker):
    """Called with pieces of a DataProto by the modes of this library itself."""

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        data.batch["a"] *= 2
        data.meta_info["seen"] = True
        return DataProto.from_dict(
            {"a": data.batch["a"]},
            {"b": data.non_tensor_batch["b"]},
            {"metrics": {"rows": len(data)}, "scale": data.meta_info["scale"]},
        )

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def total(self, data: DataProto) -> int:
        return int(data.batch["a"].sum())

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def told(self, rows: torch.Tensor, settings: DataProto) -> Any:
        return len(rows), settings.meta_info["k"]


@pytest.fixture(scope="module")
def group() -> Any:
    with px.ResourcePool([3], use_gpu=False, backend="inline") as pool:
        yield px.WorkerGroup(pool, Doubler)


def test_rows_are_split_over_ranks_and_joined_in_order(group: Any) -> None:
    result = group.double(batch(7, scale=2))

    assert result.batch["a"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert [row["row"] for row in result.non_tensor_batch["b"]] == list(range(7))
    assert result.meta_info == {"metrics": {"rows": [3, 2, 2]}, "scale": 2}


def test_the_callers_batch_is_not_changed_by_the_ranks(group: Any) -> None:
    data = batch(6, scale=2)

    group.double(data)

    assert (data.batch["a"].tolist(), data.meta_info) == ([0, 1, 2, 3, 4, 5], {"scale": 2})


def test_every_rank_is_called_with_fewer_rows_than_ranks(group: Any) -> None:
    assert group.count(batch(2)) == [1, 1, 0]


def test_nested_tensors_are_split_over_ranks(group: Any) -> None:
    rows = [torch.arange(n) for n in (1, 2, 3, 4)]
    held = TensorDict({"a": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [4])

    assert group.count(DataProto(held)) == [2, 1, 1]


def test_a_whole_batch_goes_to_all_ranks(group: Any) -> None:
    assert group.total(batch(4)) == [6, 6, 6]


def test_meta_info_alone_is_replicated_beside_rows(group: Any) -> None:
    assert group.told(torch.zeros(3), DataProto(meta_info={"k": 5})) == [(1, 5)] * 3


def test_a_future_batch_is_a_batch_when_it_is_fetched(group: Any) -> None:
    assert group.double.submit(batch(3, scale=1)).result().batch["a"].tolist() == [0, 2, 4]


@pytest.mark.slow
def test_futures_over_ray_references(ray_cluster: None) -> None:
    import ray

    whole = DataProtoFuture.concat([ray.put(piece) for piece in batch(6).chunk(2)])

    assert whole.get().batch["a"].tolist() == list(range(6))
    assert [piece.get().batch["a"].tolist() for piece in whole.chunk(4)] == [[0, 1], [2, 3], [4], [5]]
    assert whole.chunk(2)[1].chunk(3)[0].get().batch["a"].tolist() == [3]
    with pytest.raises(AssertionError, match="int"):
        DataProtoFuture.concat([ray.put(1)]).get()


@pytest.mark.slow
def test_values_put_in_parallel_are_what_ray_gets(ray_cluster: None) -> None:
    import ray

    from phalanx.compat.verl.utils.ray_utils import parallel_put

    first, second, third = ray.get(parallel_put([batch(2), {"a": [torch.ones(2)]}, 3], max_workers=2))

    assert same(first, batch(2))
    assert (second["a"][0].tolist(), third) == ([1.0, 1.0], 3)


class Gatherer(px.Worker):
    @px.register(px.Dispatch.ONE_TO_ALL)
    def gather(self) -> Any:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rows = self.rank + 1
        data = DataProto.from_dict(
            {"a": torch.full((rows, 2), float(self.rank)), "flag": torch.ones(rows).bool()},
            {"b": [f"{self.rank}.{i}" for i in range(rows)]},
        )
        all_gather_data_proto(data, dist.group.WORLD)
        dist.destroy_process_group()
        return data.batch["a"][:, 0].tolist(), data.non_tensor_batch["b"].tolist(), len(data)


@pytest.mark.slow
def test_every_rank_of_a_process_group_gets_the_rows_of_all(ray_cluster: None) -> None:
    with px.ResourcePool([2], use_gpu=False) as pool:
        results = px.WorkerGroup(pool, Gatherer).gather()

    assert results == [([0.0, 1.0, 1.0], ["0.0", "1.0", "1.1"], 3)] * 2
