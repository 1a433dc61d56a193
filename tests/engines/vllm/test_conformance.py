"""The conformance suite of engines on vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil
import pytest

import phalanx as px
from tests.conformance.engines import EngineConformance
from tests.engines.vllm.conftest import file_of_output, left_since, made, refuses, things_of_engines
from tests.engines.vllm.models import load_model


class TestVllm(EngineConformance):
    """The suite, on one accelerator."""

    kind = "one accelerator"

    @pytest.fixture(scope="class")
    def model(self, models: dict[str, str]) -> Any:
        return load_model(models["endless"])

    @pytest.fixture(scope="class")
    def before(self) -> list[set[Any]]:
        return things_of_engines()

    @pytest.fixture(scope="class")
    def rollout(
        self, cluster: None, models: dict[str, str], before: list[set[Any]]
    ) -> Iterator[px.WorkerGroup]:
        pool, group = made(models["endless"], self.kind, serve=True)
        with pool:
            yield group

    def test_a_closed_engine_leaves_nothing(self, rollout: px.WorkerGroup, before: list[set[Any]]) -> None:
        (place,) = (urlparse(endpoint.url) for endpoint in px.engines.endpoints(rollout))
        host, port = place.hostname or "", place.port or 0
        assert not refuses(host, port)
        (output,) = rollout.run(file_of_output)
        said = len(Path(output).read_text())
        rollout.close()

        assert not any(left_since(before))
        assert refuses(host, port)
        assert "Exception" not in Path(output).read_text()[said:]


class TestVllmOnTwoAccelerators(TestVllm):
    """The suite, on a tensor-parallel engine on the accelerators of its slot, which are logical here."""

    kind = "two accelerators"

    def test_a_tensor_parallel_engine_has_a_process_for_each_accelerator(
        self, rollout: px.WorkerGroup
    ) -> None:
        assert sum("Worker" in name for name in rollout.run(children)[0]) == 2

    def test_a_closed_engine_leaves_nothing(self, rollout: px.WorkerGroup, before: list[set[Any]]) -> None:
        super().test_a_closed_engine_leaves_nothing(rollout, before)


def children(_: px.Worker) -> list[str]:
    """Return the names of all descendant processes."""
    return [" ".join([one.name(), *one.cmdline()]) for one in psutil.Process().children(recursive=True)]
