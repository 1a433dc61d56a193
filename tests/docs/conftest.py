"""How code that runs in a process of its own finds the session's cluster."""

from __future__ import annotations

import pytest


@pytest.fixture
def address(ray_cluster: None) -> str:
    """The address of the session's cluster, for ``RAY_ADDRESS``."""
    import ray

    return ray.get_runtime_context().gcs_address
