"""Several encoded values in one stored object."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from phalanx.wire.bundle import Bundle
from phalanx.wire.codec import Policy, decode, decoding, encode


def stored(*values: Any, **options: Any) -> Bundle:
    """A bundle as a reader finds it, its buffers in memory of the store."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(
        Bundle([encode(value, **options) for value in values]), 5, buffer_callback=buffers.append
    )
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


def test_each_value_is_decoded_by_itself() -> None:
    bundle = stored({"x": torch.arange(6).view(2, 3), "name": "a"}, [1, 2], np.ones(4))
    assert decode(bundle.values[1]) == [1, 2]
    assert np.array_equal(decode(bundle.values[2]), np.ones(4))
    first = decode(bundle.values[0])
    assert torch.equal(first["x"], torch.arange(6).view(2, 3))
    assert first["name"] == "a"


def test_decoding_one_value_counts_its_bytes_alone() -> None:
    bundle = stored(torch.ones(1000), torch.ones(10))
    assert bundle.values[1].nbytes < 1000 < 4000 < bundle.values[0].nbytes
    assert bundle.nbytes == sum(value.nbytes for value in bundle.values)


def test_values_arrive_in_memory_of_their_own() -> None:
    bundle = stored(torch.zeros(8), torch.zeros(8))
    decode(bundle.values[0]).add_(1)
    assert decode(bundle.values[0]).sum() == 0
    assert decode(bundle.values[1]).sum() == 0


def test_values_can_be_read_in_place() -> None:
    bundle = stored(torch.arange(8), torch.arange(8))
    with decoding(Policy.READONLY):
        first, again = decode(bundle.values[0]), decode(bundle.values[0])
    assert first.data_ptr() == again.data_ptr()


def test_what_the_sender_asked_for_is_kept() -> None:
    bundle = stored(np.ones(4), np.ones(4), policy=Policy.READONLY)
    assert not decode(bundle.values[1]).flags.writeable


def test_tokens_are_restored_for_each_value() -> None:
    class Place:
        pass

    place = Place()
    bundle = stored([place], [place, place], hoist={Place: lambda _: "token"})
    assert decode(bundle.values[1], restore=str.upper) == ["TOKEN", "TOKEN"]


def test_a_long_head_goes_out_of_band() -> None:
    names = [f"name {index}" for index in range(20_000)]
    assert decode(stored([1], {"names": names}).values[1]) == {"names": names}
