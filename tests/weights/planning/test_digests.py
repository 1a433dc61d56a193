"""Digests compare received with sent tensors, for any shards of both sides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.weights.boxes import whole
from phalanx.weights.digests import Verify, _box_digest, _sampled_elements, tensor_digest


@pytest.mark.parametrize("verify", ["sampled", "full"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_casts_and_views_have_the_digest_of_their_copy(dtype: torch.dtype, verify: Verify) -> None:
    # a cast is sampled by torch, a copy by numpy
    masters = torch.randint(0, 2, (300, 5000), dtype=torch.int16)
    copy = masters.to(dtype)

    for version in (0, 7):
        cast = _box_digest(masters, whole(masters.shape), dtype, verify, version)
        assert cast == tensor_digest(copy, verify=verify, version=version)
    for view in (copy[7:, 1000:2000], torch.ones(4, 2, dtype=torch.complex64).conj().imag):
        assert tensor_digest(view, verify=verify) == tensor_digest(view.clone(), verify=verify)


@given(st.integers(1, 40), st.integers(1, 6000), st.integers(0, 50), st.data())
@settings(max_examples=30)
def test_a_sample_has_an_element_of_every_row(
    rows: int, length: int, version: int, data: st.DataObject
) -> None:
    tensor = torch.zeros(rows, length, dtype=torch.bfloat16)
    before = tensor_digest(tensor, version=version)
    tensor[data.draw(st.integers(0, rows - 1))] = 1

    assert tensor_digest(tensor, version=version) != before


@pytest.mark.parametrize(("shape", "versions"), [((1, 2048), 2048), ((256, 96), 4 * 96)])
def test_samples_of_successive_versions_have_every_element_once(
    shape: tuple[int, int], versions: int
) -> None:
    hits = torch.zeros(shape, dtype=torch.int64)
    for version in range(versions):
        hits[_sampled_elements(whole(shape), 2, version)] += 1

    assert torch.equal(hits, torch.ones_like(hits))
