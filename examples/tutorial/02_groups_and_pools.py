"""Tutorial 2: a worker per accelerator, groups of workers, and pools that share accelerators.

A pool is an ordered list of slots, each with an accelerator (of the machine, else logical). A group starts a worker
per slot. Groups on the same slots share the accelerators, as separate processes.
"""

from __future__ import annotations

import torch

import phalanx as px


class Accumulator(px.Worker):
    """A value that starts at the rank, on the device of its slot."""

    def __init__(self) -> None:
        self.value = torch.zeros(1, device=self.device) + self.rank

    def add(self, x: float) -> torch.Tensor:
        self.value += x
        return self.value.cpu()


def numbers(tensors: list[torch.Tensor]) -> list[float]:
    return [tensor.item() for tensor in tensors]


def main() -> None:
    px.init(num_gpus=8)

    with (
        px.ResourcePool([4], name_prefix="first") as first,
        px.ResourcePool([4], name_prefix="second") as second,
    ):
        # `execute_all_sync` calls a method by name on every rank and waits. Where every argument is a list of
        # world_size elements, each rank gets its own element; what comes back is a list by rank.
        group = px.WorkerGroup(first, Accumulator, name="one")
        values = group.execute_all_sync("add", x=[1, 1, 1, 1])
        print("on the first pool: ", values)
        assert numbers(values) == [1, 2, 3, 4]

        # The merge of two pools is a view over the slots of both: it reserves nothing of its own.
        both = first + second
        group_second = px.WorkerGroup(second, Accumulator, name="two")
        group_both = px.WorkerGroup(both, Accumulator, name="both")

        values = group_second.execute_all_sync("add", x=[2, 2, 2, 2])
        print("on the second pool:", values)
        assert numbers(values) == [2, 3, 4, 5]

        values = group_both.execute_all_sync("add", x=[3] * 8)
        print("on both pools:     ", values)
        assert numbers(values) == [3, 4, 5, 6, 7, 8, 9, 10]

        sizes = [group.world_size, group_second.world_size, group_both.world_size]
        print("world sizes:       ", *sizes)
        assert sizes == [4, 4, 8]

        # Each slot now holds a share of two groups; closing a group frees its shares, closing a pool its slots.
        print(both.explain())
        assert [len(both[rank].groups) for rank in range(8)] == [2] * 8

    px.shutdown()


if __name__ == "__main__":
    main()
