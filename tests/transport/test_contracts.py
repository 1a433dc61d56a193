"""The verbs of each contract, called directly on each backend that is shipped."""

from __future__ import annotations

import pytest

from phalanx.runtime.session import connection
from phalanx.testing.contracts import TransportContracts
from phalanx.transport.base import Transport
from phalanx.transport.inline import InlineTransport


class TestInline(TransportContracts):
    @pytest.fixture(scope="class")
    def transport(self) -> Transport:
        return InlineTransport()


class TestRay(TransportContracts):
    @pytest.fixture(scope="class")
    def transport(self, ray_cluster: None) -> Transport:
        return connection.transport("ray")
