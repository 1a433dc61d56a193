"""Deltas lead from one version to the next, bit for bit, and are small where little changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import WeightsTransferError
from phalanx.weights.planning.delta import Base, apply_delta, make_delta

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def changed(old: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    """``old`` with a share of its elements drawn anew, bit patterns of NaN included."""
    random = torch.Generator().manual_seed(seed)
    raw = old.clone().view(-1).view(torch.uint8).view(-1, old.element_size())
    at = torch.rand(raw.shape[0], generator=random) < share
    raw[at] = torch.randint(0, 256, (int(at.sum()), old.element_size()), dtype=torch.uint8, generator=random)
    return raw.view(-1).view(old.dtype).view(old.shape)


@settings(max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 5000),
    st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    st.integers(0, 9),
)
def test_a_delta_leads_to_the_same_bits(dtype: torch.dtype, size: int, share: float, seed: int) -> None:
    old = torch.arange(size).to(dtype)
    new = changed(old, share, seed)
    found = old.clone()

    apply_delta(make_delta(new, old, base=3), found, version=3)

    assert bits(found) == bits(new)


@pytest.mark.parametrize("at", [0, 0xFFFE, 0xFFFF, 0x10000, 200_000, 299_999])
def test_changes_that_lie_far_apart_are_found_again(at: int) -> None:
    old = torch.zeros(300_000, dtype=torch.bfloat16)
    new = old.clone()
    new[at] = 7
    found = old.clone()

    delta = make_delta(new, old, base=1)
    apply_delta(delta, found, version=1)

    assert delta.kind == "sparse" and torch.equal(found, new)


def test_one_hundredth_of_bf16_changed_costs_less_than_three_and_a_half_hundredths() -> None:
    old = torch.randn(1_000_000).bfloat16()

    delta = make_delta(changed(old, 0.01), old, base=1)

    assert delta.nbytes <= 0.035 * old.numel() * 2


def test_small_steps_of_all_elements_are_compressed() -> None:
    old = torch.randn(100_000)
    new = (old.view(torch.int32) ^ 1).view(torch.float32)

    delta = make_delta(new, old, base=1)

    assert delta.kind == "xor" and delta.nbytes < 0.1 * old.numel() * 4


def test_a_delta_is_never_larger_than_everything() -> None:
    old = torch.randn(10_000)

    delta = make_delta(changed(old, 1.0), old, base=1)

    assert delta.kind == "dense" and delta.nbytes == old.numel() * 4


def test_a_zero_of_another_sign_is_a_change() -> None:
    assert make_delta(torch.tensor([-0.0]), torch.tensor([0.0]), base=1).changed == 1


def test_a_part_of_a_tensor_is_changed_in_place() -> None:
    whole = torch.zeros(4, 6)
    part = whole[1:3, 2:5]

    apply_delta(make_delta(torch.ones(2, 3), part, base=1), part, version=1)

    assert whole.sum() == 6


def test_a_target_of_another_version_is_refused_and_left_as_it_is() -> None:
    target = torch.zeros(30)
    delta = make_delta(torch.eye(30)[0], target, base=2)

    with pytest.raises(WeightsTransferError, match="must be sent everything"):
        apply_delta(delta, target, version=1)

    assert target.sum() == 0


def test_the_first_delta_of_a_base_is_everything() -> None:
    assert Base().delta("w", torch.ones(3)).kind == "dense"


def test_a_base_moves_on_when_all_targets_have_the_version() -> None:
    base, tensor = Base(), torch.ones(3)
    base.delta("w", tensor)
    base.confirm(1)
    tensor[0] = 2

    assert (delta := base.delta("w", tensor)).base == 1 and delta.changed == 1


def test_a_base_stays_where_it_is_when_a_sync_fails() -> None:
    base, tensor = Base(), torch.ones(3)
    base.delta("w", tensor)
    base.confirm(1)
    tensor[0] = 2
    base.delta("w", tensor)
    base.drop()

    assert base.delta("w", tensor).changed == 1


def test_targets_that_are_of_no_version_are_sent_everything() -> None:
    base, tensor = Base(), torch.ones(3)
    base.delta("w", tensor)
    base.confirm(1)
    base.drop(keep_base=False)

    assert base.delta("w", tensor).kind == "dense"


def test_the_cost_of_a_base_is_told() -> None:
    base = Base()
    base.delta("w", torch.ones(3))
    base.confirm(1)

    assert base.nbytes == 12
