"""Blocks of ranks that a resize keeps together, from the meshes of a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from phalanx.members.meshes import block_of

SMALL = st.integers(1, 6)


@given(SMALL, SMALL, SMALL)
def test_a_block_is_a_multiple_of_the_ranks_that_every_mesh_needs(dp: int, first: int, second: int) -> None:
    size = first * second
    meshes = {"one": px.Mesh(dp=dp * second, tp=first), "two": px.Mesh(dp=dp * first, pp=second)}
    block = block_of("g", meshes)

    assert (dp * size) % block == 0
    assert block % first == 0
    assert block % second == 0


def test_a_registered_mesh_whose_dp_order_differs_from_the_ranks_is_refused() -> None:
    mesh = px.Mesh.from_coordinates([{"dp": 0}, {"dp": 2}, {"dp": 1}])
    with pytest.raises(px.DeclarationError, match=r"dp, as the slowest one"):
        block_of("g", {"default": mesh})
