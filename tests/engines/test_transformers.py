"""``TransformersRollout`` on a small Llama: the conformance suite of engines, and what is its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx as px
from phalanx.engines.transformers import TransformersRollout
from phalanx.testing.engines import EngineConformance

SLOW_ON_RAY = True
THREADS = {"OMP_NUM_THREADS": "1"}


def small_llama(**given: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.4,
        **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **given},
    )
    return LlamaForCausalLM(config).eval()


class TestPadded(EngineConformance):
    @pytest.fixture(scope="class")
    def model(self) -> LlamaForCausalLM:
        return small_llama()

    @pytest.fixture(scope="class")
    def rollout(self, backend: str) -> Iterator[Any]:
        with px.ResourcePool([2], use_gpu=False) as pool:
            yield px.WorkerGroup(
                pool, TransformersRollout.bind(small_llama, weights="policy", seed=0), env=THREADS
            )

    @pytest.fixture(scope="class")
    def source_pool(self, backend: str) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([1], use_gpu=False) as pool:
            yield pool
