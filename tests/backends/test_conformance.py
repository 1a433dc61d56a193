"""Contracts of groups, and of the methods of a backend called directly, on each shipped backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from tests.conformance.backends import BackendContracts
from tests.conformance.groups import BackendConformance


class OnInline:
    slots = 4

    @pytest.fixture(scope="class")
    def pool(self) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([self.slots], use_gpu=False, backend="inline") as pool:
            yield pool


class OnRay:
    slots = 4

    @pytest.fixture(scope="class")
    def pool(self, ray_cluster: None) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([self.slots], use_gpu=False, backend="ray") as pool:
            yield pool


class TestInline(OnInline, BackendConformance): ...


class TestRay(OnRay, BackendConformance): ...


class TestInlineDirectly(OnInline, BackendContracts):
    slots = 2


class TestRayDirectly(OnRay, BackendContracts):
    slots = 2
