"""Slots of a pool, views over them, and the stable rank order."""

from __future__ import annotations

import pickle
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DeclarationError
from phalanx.topology.slots import Slot, SlotView, order_ranks, slots_of

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def pool(*shape: int, name: str = "p") -> SlotView:
    return slots_of(shape, name)


def test_views_can_be_split_indexed_from_the_end_and_pickled():
    view = pool(4, 2)

    assert [[*map(len, part.blocks)] for part in view.split(numpy.int64(3))] == [[3], [1, 2]]
    assert view[-1].slots == (Slot(block=1, bundle=1, pool="p"),)
    assert pickle.loads(pickle.dumps(view[1:5])) == view[1:5]


@given(shapes, st.data())
def test_parts_of_a_split_have_all_slots_in_order(shape: list[int], data: st.DataObject):
    view = pool(*shape)
    cut = data.draw(st.integers(1, view.world_size))

    parts = view.split([cut, view.world_size - cut] if cut < view.world_size else [cut])

    assert sum((part.slots for part in parts), ()) == view.slots


@given(shapes, st.slices(12))
def test_a_view_is_sliced_like_a_list_and_an_empty_slice_is_refused(shape: list[int], key: slice):
    view = pool(*shape)
    expected = view.slots[key]

    if expected:
        assert view[key].slots == expected
    else:
        with pytest.raises(DeclarationError, match="is empty"):
            view[key]


def test_ranks_with_equal_accelerators_and_blocks_keep_their_place():
    assert order_ranks(pool(3).slots, [()] * 3) == order_ranks(pool(3).slots, ["0"] * 3) == (0, 1, 2)
    assert order_ranks(pool(2, 2).slots, "7310") == (1, 0, 3, 2)


@given(st.integers(0, 99))
def test_rank_order_of_a_block_does_not_depend_on_the_order_of_reports(seed: int):
    slots = list(pool(6).slots)
    devices = dict(zip(slots, ["11", "2", "GPU-x", "0", "GPU-a", "10"], strict=True))
    random.Random(seed).shuffle(slots)

    order = order_ranks(slots, [[devices[slot]] for slot in slots])

    assert [devices[slots[i]] for i in order] == ["0", "2", "10", "11", "GPU-a", "GPU-x"]
