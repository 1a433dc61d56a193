"""Deltas: a bucket of changes gives the same bits as a bucket of all elements."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.weights.buckets import apply_delta, make_delta

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
