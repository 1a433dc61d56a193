"""Random structures of tensors and arrays arrive as the codec documents it, on every route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.wire.codec import decode, decoding, encode
from tests.wire.routes import payload, through_buffers, through_bytes, through_pickle

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int8, torch.int16, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
)
ARRAY_DTYPES = ("f8", "f2", "?", "i4", ">i2", "c16", "M8[s]", "U3", "S2", "i4,u1", "O")

relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype, with any strides that slicing, permuting and expanding make."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(np.prod(shape))
    numbers = torch.tensor(
        draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), dtype=torch.float32
    )
    made = numbers.reshape(shape).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1 and draw(st.booleans()):
        made = made.requires_grad_()
    return draw(views(made))


@st.composite
def views(draw: st.DrawFn, of: Any) -> Any:
    """The tensor or array itself, or a view of it."""
    kind = draw(st.sampled_from(["same", "permuted", "stepped", "sliced", "expanded", "reversed"]))
    dims = len(of.shape)
    if kind == "permuted" and dims:
        order = draw(st.permutations(range(dims)))
        return of.permute(order) if isinstance(of, torch.Tensor) else of.transpose(order)
    if kind == "stepped" and dims:
        return of[..., ::2]
    if kind == "sliced" and dims and of.shape[0]:
        return of[draw(st.integers(0, of.shape[0] - 1)) :]
    if kind == "reversed" and dims:
        # flip() does not exist for every dtype; a tensor has no negative strides anyway.
        if isinstance(of, np.ndarray):
            return of[::-1]
        return torch.stack(of.unbind(0)[::-1]) if len(of) else of
    if kind == "expanded":
        if isinstance(of, torch.Tensor):
            return of.expand(2, *of.shape)
        return np.broadcast_to(of, (2, *of.shape))
    return of


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = int(np.prod(shape))
    numbers = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return draw(
        views(np.array(numbers, dtype="i8").astype(draw(st.sampled_from(ARRAY_DTYPES))).reshape(shape))
    )


leaves = st.one_of(
    tensors(),
    arrays(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Nested structures in which leaves may occur several times."""
    some = draw(st.lists(leaves, min_size=1, max_size=5))
    repeated = st.sampled_from(some)
    return draw(
        st.recursive(
            repeated,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.tuples(inner, inner),
                st.dictionaries(st.text(max_size=2), inner, max_size=3),
            ),
            max_leaves=8,
        )
    )


def through_views(value: Any) -> Any:
    with decoding(readonly=True):
        return decode(encode(value))


every_route = pytest.mark.parametrize(
    "route", [through_bytes, through_buffers, through_pickle, through_views], ids=lambda route: route.__name__
)


def flat(value: Any) -> list[Any]:
    """Return the leaves in order, with the containers' types and keys between them."""
    if isinstance(value, dict):
        return [dict, *value, *(leaf for item in value.values() for leaf in flat(item))]
    if isinstance(value, list | tuple):
        return [type(value), len(value), *(leaf for item in value for leaf in flat(item))]
    return [value]


def raw(tensor: torch.Tensor) -> list[int]:
    # Into new memory: contiguous() keeps the odd strides of axes of length 0 and 1, which view() refuses.
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype)
    fresh.view(tensor.shape).copy_(tensor.detach())
    return fresh.view(torch.uint8).tolist()


def is_dense(leaf: Any) -> bool:
    """Return whether some order of the axes is contiguous, computed differently than in the codec."""
    strides = leaf.stride() if isinstance(leaf, torch.Tensor) else leaf.strides
    order = sorted(range(len(leaf.shape)), key=lambda axis: (-strides[axis], -leaf.shape[axis]))
    if isinstance(leaf, torch.Tensor):
        return leaf.permute(order).is_contiguous()
    return bool(leaf.transpose(order).flags.c_contiguous)


def assert_same_leaf(sent: Any, arrived: Any) -> None:
    assert type(arrived) is type(sent)
    if isinstance(sent, torch.Tensor):
        assert (arrived.dtype, arrived.shape, raw(arrived)) == (sent.dtype, sent.shape, raw(sent))
        assert arrived.requires_grad == (sent.requires_grad and sent.is_leaf)
        assert arrived.is_leaf
    elif isinstance(sent, np.ndarray):
        assert (arrived.dtype, arrived.shape, arrived.tolist()) == (sent.dtype, sent.shape, sent.tolist())
    else:
        assert arrived == sent


@every_route
@relaxed
@given(sent=trees())
def test_any_structure_arrives_equal_and_keeps_which_leaves_are_one_object(route: Any, sent: Any) -> None:
    before, after = flat(sent), flat(route(sent))
    for a, b in zip(before, after, strict=True):
        assert_same_leaf(a, b)
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if isinstance(a, torch.Tensor | np.ndarray)]
    assert [[b is d for _, d in pairs] for _, b in pairs] == [[a is c for c, _ in pairs] for a, _ in pairs]


@every_route
@relaxed
@given(sent=st.one_of(tensors(), arrays().filter(lambda a: a.dtype != object)))
def test_strides_of_dense_memory_are_kept_and_other_memory_becomes_contiguous(route: Any, sent: Any) -> None:
    arrived = route(sent)
    if 0 in sent.shape:
        return
    if isinstance(sent, torch.Tensor):
        wanted = (
            sent.stride() if is_dense(sent) and not sent.is_contiguous() else torch.empty(sent.shape).stride()
        )
        assert arrived.stride() == wanted
    elif is_dense(sent) and not sent.flags.c_contiguous:
        assert arrived.strides == sent.strides
    else:
        assert arrived.flags.c_contiguous


@relaxed
@given(sent=st.one_of(tensors(), arrays().filter(lambda a: a.dtype != object)))
def test_only_the_bytes_that_a_view_covers_are_sent(sent: Any) -> None:
    itemsize = sent.element_size() if isinstance(sent, torch.Tensor) else sent.dtype.itemsize
    assert payload(encode(sent)) == int(np.prod(sent.shape)) * itemsize
