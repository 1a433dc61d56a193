"""Tutorial 3: how arguments reach the ranks, which ranks run, and how results return.

`px.register` declares it at the method; the caller writes `group.add(x=10)`.
"""

from __future__ import annotations

from typing import Any

import torch

import phalanx as px


class Accumulator(px.Worker):
    """A value that starts at the rank, on the device of its slot."""

    def __init__(self) -> None:
        self.value = torch.zeros(1, device=self.device) + self.rank

    @px.register(px.Dispatch.ONE_TO_ALL)
    def add(self, x: float) -> torch.Tensor:
        """Add the same `x` on every rank."""
        self.value = self.value + x
        return self.value.cpu()

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def double(self, rows: torch.Tensor) -> torch.Tensor:
        """Double rows, which are split over the ranks and joined again."""
        return rows * 2


def two_to_all(group: Any, *args: Any, **kwargs: Any) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """Deal out pairs: even ranks get the first element of each argument, odd ranks the second.

    A dispatch function returns every argument as a list with an element per rank.
    """

    def deal(pair: list[Any]) -> list[Any]:
        return [pair[rank % 2] for rank in range(group.world_size)]

    return [deal(pair) for pair in args], {name: deal(pair) for name, pair in kwargs.items()}


def by_rank(group: Any, outputs: list[Any]) -> list[Any]:
    """Return the result of the call from the outputs: here all outputs, by rank."""
    return outputs


class Adder(px.Worker):
    """A worker with a constructor argument, equal on every rank."""

    def __init__(self, start: int) -> None:
        self.start = start

    @px.register({"dispatch_fn": two_to_all, "collect_fn": by_rank})
    def add_pairs(self, x: int, y: int) -> int:
        return self.start + x + y

    @px.register(px.Dispatch.ALL_TO_ALL, px.Execute.RANK_ZERO)
    def add_on_rank_zero(self, x: int, y: int) -> int:
        return self.start + x + y


def main() -> None:
    px.init(num_gpus=8)

    with px.ResourcePool([8]) as pool:
        accumulators = px.WorkerGroup(pool, Accumulator)
        values = accumulators.add(x=10)
        print("add(x=10):        ", values)
        assert [value.item() for value in values] == [10, 11, 12, 13, 14, 15, 16, 17]

        # Ten rows over eight ranks: splits may be uneven, and rows come back as they went in.
        rows = torch.arange(20.0).reshape(10, 2)
        assert torch.equal(accumulators.double(rows), rows * 2)

        # A slice of a pool is a pool; `bind` keeps the arguments that each rank makes the class with.
        adders = px.WorkerGroup(pool[0:4], Adder.bind(start=2))
        pairs = adders.add_pairs(x=[1, 2], y=[5, 6])
        print("two to all:       ", pairs)
        assert pairs == [8, 10, 8, 10]

        # Only rank 0 runs it, with the arguments as they are; its value is the result, not a list of one.
        value = adders.add_on_rank_zero(x=1, y=2)
        print("rank zero:        ", value)
        assert value == 5

        print("world size:       ", accumulators.world_size)
        assert accumulators.world_size == 8

    px.shutdown()


if __name__ == "__main__":
    main()
