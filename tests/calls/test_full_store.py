"""Calls while the object store is full or too small, on a cluster of the test in another process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.testing import faults
from tests.support.scripts import tell, told_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STORE = 200 << 20  # bytes
FITS, TOO_LARGE = 40_000_000, 300_000_000  # bytes


class Summing(px.Worker):
    @px.register
    def total(self, values: Any) -> int:
        return int(values.sum())


def outcome(group: Any, nbytes: int) -> Any:
    try:
        return group.total(np.ones(nbytes, np.uint8))
    except px.DispatchError as error:
        return str(error)


def main() -> None:
    """Run the driver, in another process."""
    px.init(backend="ray", num_cpus=4, address="local", object_store_memory=STORE)
    seen: dict[str, Any] = {}
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Summing) as group:
        with faults.full_store(0.9) as filled:
            seen["filled"] = filled
            seen["while full"] = outcome(group, FITS)
            seen["small while full"] = outcome(group, 10)
            seen["state while full"] = group.state
        seen["too large"] = outcome(group, TOO_LARGE)
        seen["afterwards"] = outcome(group, FITS)
        seen["state"] = group.state
    px.shutdown()
    tell(seen)


def test_calls_work_in_a_full_store_and_values_larger_than_the_store_are_refused() -> None:
    (found,) = told_by(__name__, timeout=220)

    assert found["filled"] > 0.8 * STORE
    assert found["while full"] == [FITS, FITS]
    assert found["small while full"] == [10, 10]
    assert "take 286.1 MiB in the object store" in found["too large"]
    assert "holds 200.0 MiB on this node. Nothing was sent" in found["too large"]
    assert (found["state while full"], found["state"]) == ("ready", "ready")
    assert found["afterwards"] == [FITS, FITS]


if __name__ == "__main__":
    main()
