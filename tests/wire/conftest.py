"""A fixture for every route from encoder to decoder."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.routes import ROUTES


@pytest.fixture(params=ROUTES, ids=lambda route: route.__name__)
def route(request: pytest.FixtureRequest) -> Any:
    """A function ``route(value, **options)`` that encodes and decodes a value."""
    return request.param
