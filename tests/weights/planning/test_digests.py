"""Digests compare received with sent tensors, for any shards of both sides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from phalanx.weights.boxes import whole
from phalanx.weights.digests import Verify, _box_digest, _bytes, _sampled_elements, tensor_digest


@pytest.mark.parametrize("verify", ["sampled", "full"])
def test_casts_and_views_have_the_digest_of_their_copy(verify: Verify) -> None:
    masters = torch.randn(300, 5000)
    view = masters[7:, 1000:2000]

    cast = _box_digest(masters, whole(masters.shape), torch.bfloat16, verify, 0)
    assert cast == tensor_digest(masters.bfloat16(), verify=verify)
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


@pytest.mark.parametrize("version", [0, 1, 7])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_a_sampled_digest_is_the_digest_of_the_sampled_elements(dtype: torch.dtype, version: int) -> None:
    part = torch.randint(0, 2, (6, 5000)).to(dtype)[1:5, 30:4999]
    index = _sampled_elements(whole(part.shape), dtype.itemsize, version)

    assert tensor_digest(part, version=version) == xxh3_64_digest(_bytes(part[index], dtype))
