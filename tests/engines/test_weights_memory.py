"""Weights that one rank of an engine loads into its own memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx as px
from tests.conformance.engines import Source


class Pair(px.Worker):
    """Two ranks, of which only the first loads the weights, into memory that it allocates."""

    def __init__(self, wrong: bool = False) -> None:
        self.got: dict[str, Any] = {}
        self.memory: dict[str, torch.Tensor] = {}
        self.wrong = wrong
        like = dict(torch.nn.Linear(4, 3, device="meta").named_parameters())
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


def test_a_rank_of_an_engine_loads_weights_into_memory_that_it_allocates() -> None:
    with px.ResourcePool([2], use_gpu=False, backend="inline", max_colocate_count=3) as pool:
        source = px.WorkerGroup(pool[0:1], Source.bind(torch.nn.Linear(4, 3)))
        target, wrong = (px.WorkerGroup(pool, Pair.bind(wrong=wrong)) for wrong in (False, True))
        (sent,) = source.change(0)
        px.WeightSync(source, target, "policy")()

        first, second = target.had()
        assert second == {}
        assert all(torch.equal(first[name], sent[name]) for name in sent)
        assert [str(one) for one in px.weights.status(target, "policy").values()] == ["complete(1)"] * 2
        message = r"memory=\) returned no tensors of the right shape and type for bias"
        with pytest.raises(px.DeclarationError, match=message):
            px.WeightSync(source, wrong, "policy")()
