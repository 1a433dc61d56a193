"""Errors between the plan and the parameters are found, named, and repaired by the next sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import phalanx as px
from phalanx.weights import buckets as true
from phalanx.weights import weight_ends
from phalanx.weights.buckets import BucketSlot
from phalanx.weights.digests import Verify
from tests.weights.weight_workers import NAME

ROWS = 8
FULL = {
    "a": torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64),
    "b": torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64) + 1e4,
}
Tensors = dict[str, torch.Tensor]


class Halves(px.Worker):
    """Publishes rows of two tensors, half of them on each rank."""

    def __init__(self) -> None:
        begin = self.rank * ROWS // 2
        self.tensors = {name: one[begin : begin + ROWS // 2].clone() for name, one in FULL.items()}
        stated = px.weights.ShardSpec((ROWS, 64), (((begin, 0), (ROWS // 2, 64)),))
        self.publish_weights(NAME, self.tensors, boxes=dict.fromkeys(self.tensors, stated))

    @px.register
    def plant(self, what: str) -> None:
        weight_ends.read_slot = PLANTED_AT_SOURCE.get(what, true.read_slot)


class Whole(px.Worker):
    def __init__(self) -> None:
        self.tensors = {name: torch.zeros_like(one) for name, one in FULL.items()}
        self.accept_weights(NAME, self.tensors)

    @px.register
    def arrived(self) -> Tensors:
        return self.tensors

    @px.register(needs_weights=False)
    def plant(self, what: str) -> None:
        weight_ends.write_slot = PLANTED_AT_TARGET.get(what, true.write_slot)


def swapped_names(tensors: true.Tensors, slot: BucketSlot) -> torch.Tensor:
    return true.write_slot(tensors, slot._replace(target_name="b" if slot.target_name == "a" else "a"))


def neighbours_piece(tensors: true.Tensors, slot: BucketSlot) -> torch.Tensor:
    return true.read_slot(tensors, slot).roll(1, 0)


def flipped_bit(tensors: true.Tensors, slot: BucketSlot) -> torch.Tensor:
    found = true.read_slot(tensors, slot).clone()
    found.view(torch.int32)[-1, -2] ^= 1
    return found


def written_meanwhile(tensors: true.Tensors, slot: BucketSlot) -> torch.Tensor:
    found = true.read_slot(tensors, slot)
    tensors["a"].add_(0)
    return found


Plant = Callable[[true.Tensors, BucketSlot], torch.Tensor]
PLANTED_AT_SOURCE: dict[str, Plant] = {
    "neighbour's piece": neighbours_piece,
    "flipped bit": flipped_bit,
    "written meanwhile": written_meanwhile,
}
PLANTED_AT_TARGET: dict[str, Plant] = {"swapped names": swapped_names}
Both = tuple[px.WorkerGroup, px.WorkerGroup]


@pytest.fixture(scope="module")
def groups(backend: str) -> Iterator[Both]:
    with px.ResourcePool([3], use_gpu=False) as pool:
        yield px.WorkerGroup(pool[0:2], Halves), px.WorkerGroup(pool[2:3], Whole)


@pytest.fixture
def plant(groups: Both) -> Iterator[Callable[[str], None]]:
    def both(what: str) -> None:
        for group in groups:
            group.plant(what)

    yield both
    both("nothing")


def fine(target: px.WorkerGroup) -> bool:
    return all(torch.equal(one, FULL[name]) for name, one in target.arrived()[0].items())


MISPLACED = r"source rank \d on target rank 0 differ from the sent values: [ab] \["
WRITTEN = r"1 tensors were written to while .*: a\. Let nothing train"


@pytest.mark.parametrize(
    ("what", "verify", "error", "says"),
    [
        *(
            (what, verify, px.weights.WeightsVerificationError, MISPLACED)
            for what in ("neighbour's piece", "swapped names")
            for verify in ("sampled", "full")
        ),
        ("flipped bit", "full", px.weights.WeightsVerificationError, "2 of 2 boxes"),
        ("written meanwhile", "sampled", px.weights.WeightsError, WRITTEN),
    ],
)
def test_misplaced_or_damaged_weights_are_named_and_the_next_sync_repairs_them(
    groups: Both, plant: Callable[[str], None], what: str, verify: Verify, error: type[Exception], says: str
) -> None:
    with px.WeightSync(*groups, NAME, verify=verify) as sync:
        sync()
        plant(what)
        with pytest.raises(error, match=says):
            sync()

        assert px.weights.status(groups[1], NAME)[0].status == "torn"
        with pytest.raises(px.weights.WeightsTorn):
            groups[1].arrived()
        plant("nothing")
        sync(expect_change=False)

    assert fine(groups[1])


def test_a_flipped_bit_is_not_found_without_verification(groups: Both, plant: Callable[[str], None]) -> None:
    plant("flipped bit")
    with px.WeightSync(*groups, NAME, verify="off") as sync:
        sync()

    assert not fine(groups[1])
