"""Fixtures of tests that start groups of their own."""

from __future__ import annotations

import pytest


@pytest.fixture
def where(request: pytest.FixtureRequest) -> str:
    """The backend of a test that starts groups of its own, given by ``parametrize(..., indirect=True)``."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param
