"""Deltas: a bucket of changes gives the same bits as a bucket of all elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import WeightsTransferError
from phalanx.weights.buckets import Bucket, BucketSlot, DeltaPacking, apply_delta, make_delta

DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8]


def random(dtype: torch.dtype, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (size,), generator=generator).to(dtype)


@given(
    st.sampled_from(DTYPES), st.integers(0, 300), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.integers(0, 9)
)
def test_a_delta_gives_the_same_bits_and_is_not_larger_than_the_tensor(
    dtype: torch.dtype, size: int, share: float, seed: int
) -> None:
    old = random(dtype, size, seed)
    new = torch.where(torch.rand(size) < share, random(dtype, size, seed + 1), old)
    target = old.clone()

    changed, payload = make_delta(new, old)
    apply_delta(changed, payload, target)

    assert torch.equal(target, new)
    assert len(payload) <= new.nbytes
    # A zero of another sign is a change.
    assert make_delta(torch.tensor([-0.0, 1, 1]), torch.tensor([0.0, 1, 1]))[0] == 1


SLOT = BucketSlot(0, 400, "float32", (100,), "w", (0,), "w", (0,), (0,))
BUCKET = Bucket(0, 0, 400, (0,), (SLOT,))


def test_a_target_of_another_version_refuses_a_delta_and_does_not_change() -> None:
    source, target, model = DeltaPacking(), DeltaPacking(), torch.zeros(100)
    packed = torch.empty(source.capacity(BUCKET), dtype=torch.uint8)
    for known, number in ((None, 1), (1, 2)):
        source.begin(known, number)
        source.pack(packed, BUCKET, lambda _: torch.randn(100))
    for known, number in ((None, 5), (5, 6)):
        target.begin(known, number)

    with pytest.raises(WeightsTransferError, match="delta for version 1, but this rank has version 5"):
        target.unpack(packed, [SLOT], lambda _: model)

    assert not model.any()
