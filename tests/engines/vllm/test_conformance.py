"""vLLM does what every engine does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.engines.vllm import AsyncVllmRollout, VllmRollout
from phalanx.testing.engines import EngineConformance
from tests.engines.vllm.conftest import ONE_THREAD, SMALL


class TestVllm(EngineConformance):
    """The suite, on one rank."""

    @pytest.fixture(scope="class")
    def model(self, models: dict[str, str]) -> Any:
        import torch
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(models["endless"], dtype=torch.float32)

    @pytest.fixture(scope="class")
    def rollout(self, cluster: None, models: dict[str, str]) -> Iterator[px.WorkerGroup]:
        with px.ResourcePool([1], use_gpu=False) as pool:
            yield px.WorkerGroup(
                pool, VllmRollout.bind(models["endless"], **SMALL), name="rollout", env=ONE_THREAD
            )

    @pytest.fixture(scope="class")
    def source_pool(self, cluster: None) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([1], use_gpu=False) as pool:
            yield pool


class TestAsyncVllm(TestVllm):
    """The suite, on an engine in processes of its own."""

    @pytest.fixture(scope="class")
    def rollout(self, cluster: None, models: dict[str, str]) -> Iterator[px.WorkerGroup]:
        with px.ResourcePool([1], use_gpu=False) as pool:
            bound = AsyncVllmRollout.bind(models["endless"], **SMALL)
            yield px.WorkerGroup(pool, bound, name="rollout", env=ONE_THREAD)
