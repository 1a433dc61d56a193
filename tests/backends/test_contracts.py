"""The verbs of each contract, called directly on each backend that is shipped."""

from __future__ import annotations

import pytest

from phalanx.backends.backend_types import Backend
from phalanx.backends.inline import InlineBackend
from phalanx.session.session import session
from tests.conformance.backends import BackendContracts

SLOW_ON_RAY = True


class TestInline(BackendContracts):
    @pytest.fixture(scope="class")
    def transport(self) -> Backend:
        return InlineBackend()


class TestRay(BackendContracts):
    @pytest.fixture(scope="class")
    def transport(self, ray_cluster: None) -> Backend:
        return session.get_backend("ray")
