"""Memory, devices and restored objects of decoded values."""

from __future__ import annotations

import asyncio
import gc
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from phalanx.errors import DispatchError
from phalanx.wire.codec import decode, decoding, encode, large_leaves
from tests.wire.routes import Pair, Token, by_every_route, in_process, payload, through_buffers


@by_every_route
def test_decoded_memory_is_private_and_writable_unless_the_value_is_readonly(route: Any) -> None:
    tensor, array = torch.zeros(3, 4), np.zeros(4)
    array.flags.writeable = False
    arrived, turned, other = route((tensor, torch.ones(3, 4).T, array))
    arrived.add_(1)
    other[:] = 1
    assert (tensor.sum().item(), array.sum()) == (0, 0)
    assert turned._base is None  # no view to autograd
    assert arrived.resize_(1000).shape == (1000,)
    assert not route(np.zeros(4), readonly=True).flags.writeable


def test_readonly_decoding_returns_views_and_arrays_that_cannot_be_written() -> None:
    sent, tensor = np.zeros(4), torch.arange(900.0).reshape(30, 30)[10:].T
    with decoding(readonly=True):
        arrived, seen = decode(encode((sent, tensor)))
    assert (seen.data_ptr(), seen.stride()) == (tensor.data_ptr(), tensor.stride())
    sent[3] = 1
    assert arrived[3] != 0  # no copy
    with pytest.raises(ValueError, match="read-only"):
        arrived[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        arrived.flags.writeable = True


def test_views_keep_their_buffers_alive_and_misaligned_messages_are_decoded() -> None:
    data = encode((torch.full((1000,), 3.0), np.full(1000, 3.0), torch.arange(5.0).double())).to_bytes()
    shifted = memoryview(b"x" + data)[1:]
    with decoding(readonly=True):
        arrived, again = decode(data), decode(shifted)
    del data, shifted
    churn = [bytes(10_000) for _ in range(50)]
    for tensor, array, aligned in (arrived, again):
        assert (tensor.sum().item(), array.sum(), len(churn)) == (3000, 3000, 50)
        assert (aligned.tolist(), aligned.data_ptr() % 8) == ([0, 1, 2, 3, 4], 0)


def test_decode_options_apply_only_to_their_block_and_task() -> None:
    async def read(readonly: bool) -> bool:
        with decoding(readonly=readonly):
            await asyncio.sleep(0)
            return decode(encoded).flags.writeable

    async def both() -> list[bool]:
        return await asyncio.gather(read(True), read(False))

    encoded = encode(np.zeros(4))
    with decoding(readonly=True):
        with decoding(readonly=False):
            inner = decode(encoded)
        middle = decode(encoded)
    outer = decode(encoded)
    assert [a.flags.writeable for a in (inner, middle, outer)] == [True, False, True]
    assert asyncio.run(both()) == [False, True]


@by_every_route
def test_externalized_objects_are_restored_once_each_and_in_order(route: Any) -> None:
    twice = Token("a")
    value = {"call": [twice, Token("b"), 3, twice], "t": torch.ones(1)}
    seen: list[str] = []

    def restore(name: str) -> list[str]:
        seen.append(name)
        return [name.upper()]

    with decoding(restore=restore):
        arrived = route(value, externalize={Token: lambda token: token.name})
    assert arrived["call"] == [["A"], ["B"], 3, ["A"]]
    assert arrived["call"][0] is arrived["call"][3]
    assert seen == ["a", "b"]


def test_restore_may_decode_other_values_with_other_options() -> None:
    stored = encode(np.arange(3)).to_bytes()

    def restore(_: Any) -> Any:
        with decoding(readonly=True):
            return decode(stored)

    with decoding(restore=restore):
        arrived = decode(encode([np.zeros(1), Token("x"), np.ones(1)], externalize={Token: lambda _: 1}))
    assert [each.tolist() for each in arrived] == [[0], [0, 1, 2], [1]]
    assert [each.flags.writeable for each in arrived] == [True, False, True]


def test_a_leaf_may_be_sent_as_a_placeholder() -> None:
    large, small = torch.zeros(1000), torch.ones(2)
    value = {"a": large, "b": [large, small]}
    encoded = encode(value, externalize_leaf=lambda leaf: ("stored", 0) if leaf is large else None)
    with decoding(restore=lambda token: large):
        arrived = decode(encoded.to_bytes())
    assert payload(encoded) == small.nbytes
    assert arrived["a"] is arrived["b"][0] is large


def test_large_leaves_are_found_once_in_the_order_of_the_encoding_up_to_an_error() -> None:
    tensor, array = torch.ones(2).as_subclass(torch.nn.Buffer), np.ma.masked_array([1.0, 2.0], [True, False])
    value = [Pair(tensor, np.ones(0)), Token("a"), {"x": array, "y": tensor}]
    found = large_leaves(value, 8, [Token])
    assert [leaf is sent for leaf, sent in zip(found, (tensor, array), strict=True)] == [True, True]
    assert [leaf is tensor for leaf in large_leaves(value, 8)] == [True]
    assert large_leaves(((1.0, "a"), {"k": [2]}), 0) == []


def test_externalize_may_decline_an_object_and_its_dispatch_errors_are_raised_unchanged() -> None:
    (arrived,) = in_process([Pair(1, 2)], externalize={Pair: lambda pair: None})
    assert (type(arrived), arrived) == (Pair, (1, 2))
    with pytest.raises(DispatchError, match=r"^not this one$"):
        encode([Token("a")], externalize={Token: Mock(side_effect=DispatchError("not this one"))})


@pytest.mark.parametrize("travel", [in_process, through_buffers])
@pytest.mark.parametrize("value", [torch.ones(9), {"a": [np.ones(9)]}, Pair(torch.ones(3), {1, 2})])
def test_encoding_and_decoding_leave_no_reference_cycles(travel: Any, value: Any) -> None:
    def left() -> int:
        travel(value)
        return gc.collect()

    travel(value)  # the first time imports modules and fills caches
    gc.collect()
    gc.disable()
    try:
        assert any(left() == 0 for _ in range(5))  # other threads of the session may leave cycles
    finally:
        gc.enable()
