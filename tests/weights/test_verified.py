"""Errors between the plan and the parameters are found, named, and repaired by the next sync."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import phalanx as px
from phalanx.weights import weight_ends
from phalanx.weights.buckets import BucketSlot, read_slot, write_slot
from phalanx.weights.digests import Verify
from phalanx.weights.manifest import Tensors
from tests.weights.weight_workers import NAME, Accepter, arrived, halves, linked, same

FULL = {
    name: torch.arange(512, dtype=torch.float32).reshape(8, 64) + start
    for name, start in (("a", 0), ("b", 1e4))
}
PUBLISHING = halves(FULL)
ACCEPTING = Accepter.bind(lambda _: {name: torch.zeros_like(one) for name, one in FULL.items()})


def swapped_names(tensors: Tensors, slot: BucketSlot) -> torch.Tensor:
    return write_slot(tensors, slot._replace(target_name="b" if slot.target_name == "a" else "a"))


def neighbours_piece(tensors: Tensors, slot: BucketSlot) -> torch.Tensor:
    return read_slot(tensors, slot).roll(1, 0)


def flipped_bit(tensors: Tensors, slot: BucketSlot) -> torch.Tensor:
    found = read_slot(tensors, slot).clone()
    found.view(torch.int32)[-1, -2] ^= 1
    return found


def written_meanwhile(tensors: Tensors, slot: BucketSlot) -> torch.Tensor:
    found = read_slot(tensors, slot)
    tensors["a"].add_(0)
    return found


MISPLACED = r"source rank \d on target rank 0 differ from the sent values: [ab] \["
WRITTEN = r"1 tensors were written to while .*: a\. Let nothing train"


@pytest.mark.parametrize(
    ("where", "planted", "verify", "error", "says"),
    [
        *(
            (where, planted, verify, px.weights.WeightsVerificationError, MISPLACED)
            for where, planted in (("read_slot", neighbours_piece), ("write_slot", swapped_names))
            for verify in ("sampled", "full")
        ),
        ("read_slot", flipped_bit, "full", px.weights.WeightsVerificationError, "2 of 2 boxes"),
        ("read_slot", written_meanwhile, "sampled", px.weights.WeightsError, WRITTEN),
    ],
)
def test_misplaced_or_damaged_weights_are_named_and_the_next_sync_repairs_them(
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    planted: Callable[[Tensors, BucketSlot], torch.Tensor],
    verify: Verify,
    error: type[Exception],
    says: str,
) -> None:
    with linked(PUBLISHING, ACCEPTING, (2, 1), verify=verify) as (_, target, sync):
        sync()
        with monkeypatch.context() as patch, pytest.raises(error, match=says):
            patch.setattr(weight_ends, where, planted)
            sync()

        assert px.weights.status(target, NAME)[0].status == "torn"
        sync()
        assert same(arrived(target), FULL)


def test_a_flipped_bit_is_not_found_without_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_ends, "read_slot", flipped_bit)
    with linked(PUBLISHING, ACCEPTING, (2, 1), verify="off") as (_, target, sync):
        sync()

        assert not same(arrived(target), FULL)
