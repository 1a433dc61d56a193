"""Boxes, runs of indices and names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.weights.boxes import Box, BoxIndex, chunk, local_boxes, meet, strided_chunk
from phalanx.weights.manifest import pack_names, unpack_names

boxes = st.integers(1, 3).flatmap(
    lambda dims: st.tuples(
        *[
            st.builds(
                Box,
                st.tuples(*[st.integers(0, 4)] * dims),
                st.tuples(*[st.integers(1, 4)] * dims),
            )
        ]
        * 2
    )
)


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


def indices(runs: list[range]) -> list[int]:
    return list(itertools.chain(*runs))


@given(boxes)
def test_two_boxes_meet_in_the_cells_that_both_have(pair: tuple[Box, Box]) -> None:
    shared = meet(*pair)

    assert (cells(shared) if shared else set()) == cells(pair[0]) & cells(pair[1])
    assert list(BoxIndex(pair[:1]).meeting(pair[1])) == ([(pair[0], shared)] if shared else [])
    assert (BoxIndex([Box(*pair[0]), Box(*pair[1])]).overlap() is not None) == bool(shared)


@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_chunks_are_those_of_torch(size: int, count: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, count - 1))
    parts = torch.arange(size).chunk(count) if size else ()

    assert indices(chunk([range(size)], part, count)) == (parts[part].tolist() if part < len(parts) else [])


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_strided_chunks_together_are_all_indices(size: int, count: int, pieces: int) -> None:
    found = [
        index for part in range(count) for index in indices(strided_chunk([range(size)], part, count, pieces))
    ]

    assert sorted(found) == list(range(size))


@pytest.mark.parametrize(
    ("runs", "found"),
    [
        ([[range(2), range(4, 5)], [range(3, 5)]], [("[0:2, 3:5]", (0, 0)), ("[4:5, 3:5]", (2, 0))]),
        ([[range(2), range(2, 5)]], [("[0:5]", (0,))]),
        ([], [("[]", ())]),
    ],
    ids=["two", "adjacent", "no dims"],
)
def test_runs_become_boxes_with_places_in_the_local_tensor(runs: Any, found: Any) -> None:
    assert [(str(patch.box), patch.at) for patch in local_boxes(runs)] == found


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), min_size=1))
def test_names_come_back_in_their_order(names: list[str]) -> None:
    assert unpack_names(pack_names(names)) == names
