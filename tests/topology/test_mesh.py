"""Ranks and coordinates, and the sets of ranks that mesh dispatch uses."""

from __future__ import annotations

import itertools
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.topology.mesh import PP_AS_DP, Mesh

meshes = st.dictionaries(
    st.sampled_from(["pp", "dp", "cp", "tp", "ep"]), st.integers(1, 4), min_size=1, max_size=4
).map(lambda axes: Mesh(**axes))


def shuffled(mesh: Mesh, seed: int) -> list[dict[str, int]]:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    random.Random(seed).shuffle(places)
    return places


def test_a_mesh_keeps_the_order_of_its_axes_and_the_first_axis_varies_slowest():
    mesh = Mesh(dp=2, pp=1, tp=3)

    assert repr(mesh) == "Mesh(dp=2, pp=1, tp=3)"
    assert (mesh.axes, mesh.shape, mesh.world_size) == (("dp", "pp", "tp"), (2, 1, 3), 6)
    assert (mesh.size(), mesh.size("tp"), mesh.size("cp")) == (6, 3, 1)
    assert [mesh.coordinate(rank, "tp") for rank in (0, 2, 3)] == [0, 2, 0]
    assert [mesh.coordinate(rank, "dp") for rank in (0, 2, 3)] == [0, 0, 1]
    assert Mesh(self=2, rank=3).coordinate(5, "rank") == 2


@pytest.mark.parametrize("dp", [-1, 4])
def test_an_axis_of_minus_1_is_resolved_from_the_world_size(dp: int):
    assert Mesh(dp=dp, tp=2).resolve(8) == Mesh(dp=4, tp=2)


@given(meshes, st.integers(0, 9))
def test_a_mesh_keeps_coordinates_reported_in_any_order_also_when_pickled(mesh: Mesh, seed: int):
    places = shuffled(mesh, seed)
    reported = Mesh.from_coordinates(places)
    reported.dp_groups()

    again = pickle.loads(pickle.dumps(reported))

    assert Mesh.from_coordinates([mesh.coordinates(rank) for rank in range(mesh.world_size)]) == mesh
    assert [reported.coordinates(rank) for rank in range(mesh.world_size)] == places
    assert [reported.rank(**place) for place in places] == list(range(mesh.world_size))
    assert (again, hash(again), again.dp_groups()) == (reported, hash(reported), reported.dp_groups())


@given(meshes, st.sampled_from([("dp",), PP_AS_DP, ("nothing",)]), st.integers(0, 9))
def test_dp_groups_cover_each_rank_once_with_a_first_rank_and_a_last_stage_collector(
    mesh: Mesh, dp_axes, seed: int
):
    mesh = Mesh.from_coordinates(shuffled(mesh, seed))

    groups = mesh.dp_groups(dp_axes)
    places = [mesh.coordinates(rank) for rank in mesh.collectors()]

    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    first = [mesh.coordinates(ranks[0]) for ranks in groups]
    assert all(at == 0 for place in first for axis, at in place.items() if axis not in dp_axes)
    assert all(c in group for c, group in zip(mesh.collectors(dp_axes), groups, strict=True))
    assert [at.get("dp", 0) for at in places] == list(range(mesh.size("dp")))
    assert all(at.get("pp", 0) == mesh.size("pp") - 1 for at in places)
    assert all(at.get(axis, 0) == 0 for at in places for axis in ("tp", "cp", "ep"))


def test_a_mesh_lists_the_ranks_of_a_slice_and_the_peers_along_an_axis():
    mesh = Mesh(dp=2, pp=2, tp=2)

    assert mesh.ranks(dp=1, tp=0) == (4, 6)
    assert mesh.peers(5, "pp") == (5, 7)
    assert mesh.peers(5, "cp") == (5,)
