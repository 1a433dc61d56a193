"""Weights between their arrival and the load of an engine whose processes share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.engines.vllm.weight_segment import KeptWeights, opened
from phalanx.weights.shared_memory import SharedTensors
from tests.engines.counting import CountingEngine

LIKE = {"a": torch.empty(3, 5, device="meta"), "b": torch.empty(7, dtype=torch.bfloat16, device="meta")}


def test_others_see_what_was_put_into_it() -> None:
    kept, values = KeptWeights(), {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    told = kept.take(values)

    found = {name: tensor.clone() for name, tensor in opened(told)}

    assert {name: tensor.dtype for name, tensor in found.items()} == {"a": torch.float32, "b": torch.bfloat16}
    assert all(torch.equal(found[name], values[name]) for name in values)
    kept.close()


def test_what_lies_in_a_segment_already_is_not_copied() -> None:
    placed = SharedTensors(LIKE)
    told = KeptWeights().take(placed.tensors)
    placed.tensors["a"].fill_(3.0)

    found = {name: tensor.clone() for name, tensor in opened(told)}

    assert torch.equal(found["a"], torch.full((3, 5), 3.0))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in placed.tensors.values())
    placed.close()


class Source(px.Worker):
    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 3)
        self.publish_weights("policy", self.model)

    @px.register
    def had(self) -> dict[str, Any]:
        return {name: one.detach().clone() for name, one in self.model.named_parameters()}


class Pair(px.Worker):
    """The first of two ranks gets the weights, in memory of its own making; the other has nothing of its own."""

    def __init__(self, wrong: bool = False) -> None:
        self.got: dict[str, Any] = {}
        self.memory: dict[str, torch.Tensor] = {}
        self.wrong = wrong
        like = {
            name: torch.empty_like(one, device="meta")
            for name, one in torch.nn.Linear(4, 3).named_parameters()
        }
        first = self.rank == 0
        self.accept_weights(
            "policy", like if first else {}, load=self.load, memory=self.make if first else None
        )

    def make(self, like: Any) -> Any:
        self.memory = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in like.items()}
        return {} if self.wrong else self.memory

    def load(self, pairs: Any) -> None:
        for name, tensor in pairs:
            if tensor.data_ptr() != self.memory[name].data_ptr():
                raise RuntimeError("it was copied")
            self.got[name] = tensor.clone()

    @px.register
    def had(self) -> dict[str, Any]:
        return self.got


@pytest.fixture
def pool() -> Any:
    with px.ResourcePool([2], use_gpu=False, backend="inline", max_colocate_count=4) as made:
        yield made


def test_one_rank_of_an_engine_takes_the_weights_into_memory_of_its_own(pool: px.ResourcePool) -> None:
    source, target = px.WorkerGroup(pool[0:1], Source), px.WorkerGroup(pool, Pair)
    px.WeightSync(source, target, "policy")()

    (sent,) = source.had()
    first, second = target.had()
    assert second == {}
    assert all(torch.equal(first[name], sent[name]) for name in sent)
    assert [str(one) for one in px.weights.status(target, "policy").values()] == ["whole(1)", "whole(1)"]


def test_memory_of_the_wrong_kind_is_refused(pool: px.ResourcePool) -> None:
    source, target = px.WorkerGroup(pool[0:1], Source), px.WorkerGroup(pool, Pair.bind(wrong=True))

    with pytest.raises(
        px.DeclarationError, match=r"memory=\) made no tensors of the right shape and type for bias"
    ):
        px.WeightSync(source, target, "policy")()


def test_engines_that_serve_nobody_have_no_endpoints(pool: px.ResourcePool) -> None:
    with pytest.raises(px.DeclarationError, match="AsyncVllmRollout has one for each"):
        px.engines.endpoints(px.WorkerGroup(pool, CountingEngine))
