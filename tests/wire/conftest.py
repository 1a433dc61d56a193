"""A fixture that encodes and decodes in each way there is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.routes import ROUTES


@pytest.fixture(params=ROUTES, ids=lambda route: route.__name__)
def route(request: pytest.FixtureRequest) -> Any:
    """``route(value, **options)`` encodes and gives what arrives."""
    return request.param
