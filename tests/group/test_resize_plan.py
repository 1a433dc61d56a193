"""Who joins and who leaves: decided from numbers and meshes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from phalanx.group.resize_plan import block_of

SMALL = st.integers(1, 6)


@given(SMALL, SMALL, SMALL)
def test_a_block_is_as_many_ranks_as_every_mesh_needs(dp: int, first: int, second: int) -> None:
    size = first * second
    meshes = {"one": px.Mesh(dp=dp * second, tp=first), "two": px.Mesh(dp=dp * first, pp=second)}
    block = block_of("g", meshes)

    assert (dp * size) % block == 0
    assert block % first == 0
    assert block % second == 0


def test_engines_of_a_registered_mesh_that_are_not_in_the_order_of_ranks_are_refused() -> None:
    mesh = px.Mesh.from_coordinates([{"dp": 0}, {"dp": 2}, {"dp": 1}])
    with pytest.raises(px.DeclarationError, match=r"dp, as the slowest one"):
        block_of("g", {"default": mesh})
