"""The verbs of each contract, called directly on each backend that is shipped."""

from __future__ import annotations

import pytest

from phalanx.runtime.session import connection
from phalanx.transport.base import Transport
from phalanx.transport.inline import InlineTransport
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.transport import SimulatedTransport
from tests.conformance.transports import TransportContracts


class TestInline(TransportContracts):
    @pytest.fixture(scope="class")
    def transport(self) -> Transport:
        return InlineTransport()


class TestSimulated(TransportContracts):
    """With the real methods on each worker."""

    @pytest.fixture(scope="class")
    def transport(self) -> Transport:
        return SimulatedTransport(Model(nodes=2, ranks_per_node=2, run="each"))


class TestRay(TransportContracts):
    @pytest.fixture(scope="class")
    def transport(self, ray_cluster: None) -> Transport:
        return connection.transport("ray")
