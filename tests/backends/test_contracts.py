"""The methods of a backend, called directly on each that is shipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from tests.conformance.backends import BackendContracts


class TestInline(BackendContracts):
    @pytest.fixture(scope="class")
    def pool(self) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([2], use_gpu=False, backend="inline") as pool:
            yield pool


class TestRay(BackendContracts):
    @pytest.fixture(scope="class")
    def pool(self, ray_cluster: None) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
            yield pool
