"""A driver with a small object store of its own that somebody else has filled; prints what happened as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

import phalanx as px
from phalanx.testing import faults
from tests.support.scripts import tell

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


if __name__ == "__main__":
    main()
