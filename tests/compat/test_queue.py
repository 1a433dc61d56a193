"""Methods that are called with what stands for rows in TransferQueue; a queue in memory takes the package's place."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData

from phalanx.compat.verl.protocol import BatchData, DataProto
from phalanx.compat.verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from phalanx.compat.verl.utils import transferqueue_utils


@dataclass
class Rows:
    """BatchMeta: rows by their number."""

    global_indexes: list[int] = field(default_factory=list)
    field_names: list[str] = field(default_factory=list)
    extra_info: dict[str, Any] = field(default_factory=dict)
    partition_ids: list[str] = field(default_factory=lambda: ["train"])

    @property
    def size(self) -> int:
        return len(self.global_indexes)

    def select_fields(self, names: list[str]) -> Rows:
        return replace(self, field_names=names)

    def chunk(self, chunks: int) -> list[Rows]:
        step = self.size // chunks
        return [
            replace(self, global_indexes=self.global_indexes[i * step : (i + 1) * step])
            for i in range(chunks)
        ]

    @staticmethod
    def concat(metas: list[Rows]) -> Rows:
        assert not any(meta.extra_info for meta in metas)
        return replace(metas[0], global_indexes=[i for meta in metas for i in meta.global_indexes])


@dataclass
class Keys:
    """KVBatchMeta: rows by their key."""

    keys: list[str]
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str = "train"
    fields: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)


class Queue:
    """The client: columns by name, rows named k0, k1, ..."""

    def __init__(self) -> None:
        self.columns: dict[str, torch.Tensor] = {"a": torch.arange(4.0), "b": torch.ones(4)}

    async def async_kv_retrieve_meta(self, keys: list[str], partition_id: str, create: bool) -> Rows:
        return Rows([int(key[1:]) for key in keys], sorted(self.columns), partition_ids=[partition_id])

    async def async_kv_retrieve_keys(self, global_indexes: list[int], partition_id: str) -> list[str]:
        return [f"k{index}" for index in global_indexes]

    async def async_get_data(self, meta: Rows) -> TensorDict:
        found = {name: self.columns[name][meta.global_indexes] for name in meta.field_names}
        return TensorDict(found, batch_size=(meta.size,))

    async def async_put(self, data: TensorDict, metadata: Rows) -> Rows:
        for name, column in list(data.items()):
            self.columns.setdefault(name, torch.zeros(4))[metadata.global_indexes] = column
        return replace(metadata, field_names=sorted({*metadata.field_names, *data.keys()}))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    package = SimpleNamespace(init=lambda: None, get_client=lambda: made)
    monkeypatch.setattr(transferqueue_utils, "tq", package)
    for module in ("utils.transferqueue_utils", "_proto.future"):
        monkeypatch.setattr(f"phalanx.compat.verl.{module}.BatchMeta", Rows)
        monkeypatch.setattr(f"phalanx.compat.verl.{module}.KVBatchMeta", Keys)
    monkeypatch.setattr(BatchData, "_CHUNKABLE_TYPES", (TensorDict, Keys, Rows))
    monkeypatch.setattr(BatchData, "_CONCATABLE_TYPES", (TensorDict, Keys, Rows))
    return made


class Model:
    """What a worker is to the bridge."""

    def __init__(self, collects: bool = True) -> None:
        self.collects = collects

    def query_collect_info(self, mesh: str) -> bool:
        return self.collects

    @register(Dispatch.ONE_TO_ALL)
    def double(self, data: TensorDict) -> TensorDict:
        settings = {"scale": NonTensorData(data["scale"])} if "scale" in set(data.keys()) else {}
        return TensorDict({"c": data["a"] * 2, **settings}, batch_size=data.batch_size)

    @register(make_nd_compute_dataproto_dispatch_fn("dp"))
    def on_mesh(self, data: TensorDict) -> TensorDict:
        return TensorDict({"c": data["a"]}, batch_size=data.batch_size)

    @register(Dispatch.ONE_TO_ALL)
    def count(self, data: TensorDict) -> int:
        return len(data)

    @register(Dispatch.ONE_TO_ALL)
    def shorten(self, data: TensorDict) -> TensorDict:
        return data[:1]

    @register(make_nd_compute_dataproto_dispatch_fn("dp"))
    def other(self, data: TensorDict) -> DataProto:
        return DataProto.from_dict({"a": torch.ones(2)})

    @register(Dispatch.ONE_TO_ALL)
    async def later(self, data: TensorDict) -> TensorDict:
        return TensorDict({"c": data["a"] * 3}, batch_size=data.batch_size)


def test_a_method_gets_the_rows_of_the_keys_and_its_output_lies_beside_them(queue: Queue) -> None:
    given = Keys(["k1", "k3"], tags=[{"x": 1}, {"x": 2}], fields="a")

    back = Model().double(given)

    assert (back.keys, back.tags, back.fields) == (["k1", "k3"], given.tags, ["a", "c"])
    assert queue.columns["c"].tolist() == [0.0, 2.0, 0.0, 6.0]


def test_settings_go_to_the_method_and_come_back_with_the_metadata(queue: Queue) -> None:
    assert Model().double(Rows([0, 1], ["a"], {"scale": 3})).extra_info == {"scale": 3}


def test_only_the_ranks_of_which_the_mode_collects_put_anything_back(queue: Queue) -> None:
    back = Model(collects=False).on_mesh(Rows([0, 1], ["a"]))

    assert back.size == 0
    assert "c" not in queue.columns


def test_an_output_without_rows_comes_back_as_it_is(queue: Queue) -> None:
    assert Model().count(Keys(["k0", "k1"])) == 2


def test_a_batch_of_a_rank_that_is_not_collected_from_is_left_out(queue: Queue) -> None:
    assert len(Model(collects=False).other(Rows([0, 1], ["a"]))) == 0


def test_no_rows_are_an_empty_batch(queue: Queue) -> None:
    assert Model().count(Rows([], [], {"scale": 1})) == 0


def test_an_output_with_other_rows_is_refused(queue: Queue) -> None:
    with pytest.raises(AssertionError, match=r"output batch size .* != meta size 2"):
        Model().shorten(Keys(["k0", "k1"]))


def test_async_methods_get_rows_as_well(queue: Queue) -> None:
    asyncio.run(Model().later(Rows([2], ["a"])))

    assert queue.columns["c"].tolist() == [0.0, 0.0, 6.0, 0.0]


def test_keys_are_split_as_rows_and_joined_as_keys_with_their_settings_by_rank(queue: Queue) -> None:
    pieces = BatchData(Keys(["k0", "k1", "k2", "k3"])).chunk(2)
    pieces = [replace(piece, extra_info={"loss": rank}) for rank, piece in enumerate(pieces)]

    whole = BatchData(pieces).concat()

    assert [piece.global_indexes for piece in pieces] == [[0, 1], [2, 3]]
    assert (whole.keys, whole.extra_info) == (["k0", "k1", "k2", "k3"], {"loss": [0, 1]})
