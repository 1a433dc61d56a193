"""Group conformance tests on each backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from tests.conformance.groups import BackendConformance


class TestInline(BackendConformance):
    @pytest.fixture(scope="class")
    def pool(self) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([4], use_gpu=False, backend="inline") as pool:
            yield pool


class TestRay(BackendConformance):
    @pytest.fixture(scope="class")
    def pool(self, ray_cluster: None) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([4], use_gpu=False, backend="ray") as pool:
            yield pool
