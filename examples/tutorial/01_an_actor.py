"""Tutorial 1: an actor, its memory request, and the status of the cluster.

A worker is an object in its own process. The smallest group has one worker: its calls return values, and submitted
calls return futures.
"""

from __future__ import annotations

import phalanx as px


class Accumulator:
    """Any class works; only the methods of the group are marked."""

    def __init__(self) -> None:
        self.value = 0

    @px.register(px.Dispatch.RANK_ZERO)
    def add(self, x: int) -> None:
        self.value += x

    @px.register(px.Dispatch.RANK_ZERO)
    def get_value(self) -> int:
        return self.value


def main() -> None:
    px.init(num_gpus=1)  # optional: the first pool starts what is needed; logical on a machine without a GPU

    # One slot, and on its node 500 MiB that the scheduler sets aside for the process.
    with px.ResourcePool([1], use_gpu=False) as pool:
        accumulator = px.WorkerGroup(pool, Accumulator, name="accumulator", memory=500 * 1024 * 1024)
        assert accumulator.get_value() == 0

        # A bare call waits; a submitted one gives a future, and this process goes on.
        call = accumulator.add.submit(10_000)
        value = accumulator.get_value.submit()  # calls to a group run in the order in which they were made
        assert call.result() is None
        assert value.result(timeout=60.0) == 10_000
        print("value:", value.result())

        # What the cluster has, what is free, and who holds it.
        status = px.debug.status()
        print(status)
        held = str(status)
        assert "accumulator" in held

    px.shutdown()


if __name__ == "__main__":
    main()
