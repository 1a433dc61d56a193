"""Group conformance tests on each backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from phalanx.runtime.session import connection
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.transport import SimulatedTransport
from tests.conformance.groups import TransportConformance
from tests.conftest import through_relays
from tests.runtime.groups.relayed_door import local_door


class TestInline(TransportConformance):
    @pytest.fixture(scope="class")
    def pool(self) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([4], use_gpu=False, backend="inline") as pool:
            yield pool


class TestInlineThroughRelays(TransportConformance):
    """Calls take another door: nothing above it knows."""

    @pytest.fixture(scope="class")
    def pool(self) -> Iterator[px.ResourcePool]:
        with (
            pytest.MonkeyPatch.context() as patch,
            px.ResourcePool([4], use_gpu=False, backend="inline") as pool,
        ):
            patch.setattr("phalanx.runtime.groups.core.DirectDoor", local_door)
            yield pool


class TestSimulated(TransportConformance):
    """With the real methods on each worker; only time is that of a model."""

    @pytest.fixture(scope="class")
    def pool(self) -> Iterator[px.ResourcePool]:
        transport = SimulatedTransport(Model(nodes=1, ranks_per_node=4, run="each"))
        with connection.standing_in(transport), px.ResourcePool([4], use_gpu=False) as pool:
            yield pool


class TestRay(TransportConformance):
    @pytest.fixture(scope="class")
    def pool(self, ray_cluster: None) -> Iterator[px.ResourcePool]:
        with px.ResourcePool([4], use_gpu=False, backend="ray") as pool:
            yield pool


@pytest.mark.soak
class TestRayThroughRelays(TransportConformance):
    """Eight ranks, three hops away."""

    @pytest.fixture(scope="class")
    def pool(self, ray_cluster: None) -> Iterator[px.ResourcePool]:
        with (
            pytest.MonkeyPatch.context() as patch,
            px.ResourcePool([8], use_gpu=False, backend="ray") as pool,
        ):
            through_relays(patch)
            yield pool
