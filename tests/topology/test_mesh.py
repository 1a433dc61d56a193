"""Ranks and coordinates, and the sets of ranks that mesh dispatch uses."""

from __future__ import annotations

import itertools
import pickle
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DeclarationError, DispatchError
from phalanx.topology.mesh import PP_AS_DP, Mesh

meshes = st.dictionaries(
    st.sampled_from(["pp", "dp", "cp", "tp", "ep"]), st.integers(1, 4), min_size=1, max_size=4
).map(Mesh.of)


def shuffled(mesh: Mesh, seed: int) -> list[dict[str, int]]:
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    random.Random(seed).shuffle(places)
    return places


def test_a_mesh_knows_its_axes_and_places_ranks_with_the_first_axis_slowest():
    mesh = Mesh(dp=2, pp=1, tp=3)

    assert repr(mesh) == "Mesh(dp=2, pp=1, tp=3)"
    assert (mesh.axes, mesh.shape, mesh.world_size) == (("dp", "pp", "tp"), (2, 1, 3), 6)
    assert (mesh.size(), mesh.size("tp"), mesh.size("cp")) == (6, 3, 1)
    assert [mesh.coordinate(rank, "tp") for rank in (0, 2, 3)] == [0, 2, 0]
    assert [mesh.coordinate(rank, "dp") for rank in (0, 2, 3)] == [0, 0, 1]
    assert Mesh(self=2, rank=3).coordinate(5, "rank") == 2


@pytest.mark.parametrize("dp", [-1, 4])
def test_the_rest_is_resolved_from_the_world_size(dp: int):
    assert Mesh(dp=dp, tp=2).resolve(8) == Mesh(dp=4, tp=2)


@pytest.mark.parametrize(
    ("mesh", "world_size", "words"),
    [
        (Mesh(dp=3), 4, ["3 ranks", "has 4", "-1"]),
        (Mesh(dp=-1, tp=3), 8, ["multiply to 3", "does not divide 8"]),
    ],
)
def test_a_mesh_that_does_not_fill_the_group_says_both_numbers(mesh: Mesh, world_size: int, words: list[str]):
    with pytest.raises(DeclarationError) as caught:
        mesh.resolve(world_size)

    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "query",
    [lambda m: m.world_size, lambda m: m.ranks(), lambda m: m.dp_groups(), lambda m: m.coordinates(0)],
)
def test_an_unresolved_mesh_asks_to_be_resolved(query):
    with pytest.raises(DispatchError, match=r"resolve\(world_size\)"):
        query(Mesh(dp=-1, tp=2))


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        *(({"dp": size}, "whole number from 1") for size in (0, -2, 1.5, True, "2", None)),
        ({"dp": -1, "tp": -1}, "dp, tp are all -1"),
        ({}, "name at least one"),
        ({"d p": 2}, "identifier"),
    ],
)
def test_axes_that_make_no_mesh_are_refused(axes, words: str):
    with pytest.raises(DeclarationError, match=words):
        Mesh.of(axes)


@given(meshes)
def test_rank_and_coordinates_are_inverse(mesh: Mesh):
    ranks = range(mesh.world_size)

    assert [mesh.rank(**mesh.coordinates(rank)) for rank in ranks] == list(ranks)


@given(meshes, st.integers(0, 9))
def test_coordinates_in_any_rank_order_make_a_mesh_that_keeps_them(mesh: Mesh, seed: int):
    places = shuffled(mesh, seed)

    again = Mesh.from_coordinates(places)

    assert [again.coordinates(rank) for rank in range(mesh.world_size)] == places


@given(meshes, st.integers(0, 9))
def test_meshes_survive_pickling_with_hash_and_queries(mesh: Mesh, seed: int):
    reported = Mesh.from_coordinates(shuffled(mesh, seed))
    reported.dp_groups()

    again = pickle.loads(pickle.dumps(reported))

    assert (again, hash(again), again.dp_groups()) == (reported, hash(reported), reported.dp_groups())


@given(meshes, st.sampled_from([("dp",), PP_AS_DP, ("nothing",)]), st.integers(0, 9))
def test_dp_groups_tile_the_ranks_and_name_one_leader_and_collector_each(mesh: Mesh, dp_axes, seed: int):
    mesh = Mesh.from_coordinates(shuffled(mesh, seed))

    groups = mesh.dp_groups(dp_axes)

    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    assert [group[0] for group in groups] == list(mesh.leaders(dp_axes))
    assert all(c in group for c, group in zip(mesh.collectors(dp_axes), groups, strict=True))


@given(meshes, st.integers(0, 9))
def test_collectors_sit_on_the_last_stage_and_at_zero_elsewhere_in_dp_order(mesh: Mesh, seed: int):
    mesh = Mesh.from_coordinates(shuffled(mesh, seed))

    places = [mesh.coordinates(rank) for rank in mesh.collectors()]

    assert [at.get("dp", 0) for at in places] == list(range(mesh.size("dp")))
    assert all(at.get("pp", 0) == mesh.size("pp") - 1 for at in places)
    assert all(at.get(axis, 0) == 0 for at in places for axis in ("tp", "cp", "ep"))


@pytest.mark.parametrize(
    ("mesh", "dp_axes", "groups", "collectors"),
    [
        (Mesh(pp=2, dp=2, cp=1, tp=2), ("dp",), ((0, 1, 4, 5), (2, 3, 6, 7)), (4, 6)),
        (Mesh(pp=2, tp=2), ("dp",), ((0, 1, 2, 3),), (2,)),
        (
            Mesh(pp=2, dp=4),
            PP_AS_DP,
            ((0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)),
            (0, 4, 1, 5, 2, 6, 3, 7),
        ),
        (Mesh(pp=2, dp=2, tp=2), PP_AS_DP, ((0, 1), (4, 5), (2, 3), (6, 7)), (0, 4, 2, 6)),
    ],
    ids=["the last stage collects", "no dp axis", "stages are dp, after dp", "every stage collects"],
)
def test_dp_groups_and_their_collectors(mesh: Mesh, dp_axes, groups, collectors):
    assert (mesh.dp_groups(dp_axes), mesh.collectors(dp_axes)) == (groups, collectors)
    assert Mesh.from_coordinates([mesh.coordinates(rank) for rank in range(mesh.world_size)]) == mesh


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (lambda: Mesh(dp=2).dp_groups(("dp", "dp")), "twice"),
        (lambda: Mesh(dp=4).coordinates(4), r"rank 4 is not in Mesh\(dp=4\); expected 0 to 3"),
        (lambda: Mesh(dp=2, tp=2, pp=1).rank(dp=0), "no coordinate for tp"),
    ],
    ids=["an axis twice", "a rank outside", "a coordinate is missing"],
)
def test_a_wrong_query_is_refused(query, words: str):
    with pytest.raises(DispatchError, match=words):
        query()


def test_a_slice_and_the_peers_along_an_axis():
    mesh = Mesh(dp=2, pp=2, tp=2)

    assert mesh.ranks(dp=1, tp=0) == (4, 6)
    assert mesh.peers(5, "pp") == (5, 7)
    assert mesh.peers(5, "cp") == (5,)


@pytest.mark.parametrize("fixed", [{"dp": 2}, {"dp": -1}, {"dp": 0.5}, {"dp": "a"}, {"typo": 1}])
def test_a_coordinate_out_of_range_is_refused_with_the_sizes(fixed):
    with pytest.raises(DispatchError, match=r"'dp': 2"):
        Mesh(dp=2).ranks(**fixed)


@pytest.mark.parametrize(
    ("reported", "sizes", "words"),
    [
        ([{"dp": 0}, {"dp": 1}, {"dp": 1}], None, "ranks 1 and 2 both report dp=1"),
        (
            [{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}],
            None,
            "(dp=2, tp=2) have 4 places for 3 ranks",
        ),
        ([{"dp": 0}, {"dp": 1, "tp": 0}], None, "axes ['dp'], rank 1 ['dp', 'tp']"),
        ([{"dp": 0}, {"dp": 10**12}], None, "1000000000001 places for 2 ranks"),
        ([{"dp": 0}, {"dp": -1}], None, "rank 1 reports dp=-1"),
        ([], None, "one dict"),
        ([{"dp": 0}, {"dp": 1}], [2, 4], "rank 0 holds dp to have size 2, rank 1 4"),
        ([{"dp": 0}, {"dp": 1}], [3, 3], "(dp=3) have 3 places for 2 ranks"),
        ([{"dp": 0}, {"dp": 3}], [2, 2], "rank 1 reports dp=3, outside"),
    ],
)
def test_coordinates_that_do_not_tile_name_the_first_conflict(reported, sizes, words):
    with pytest.raises(DeclarationError, match=re.escape(words)):
        Mesh.from_coordinates(reported, sizes=sizes and [{"dp": size} for size in sizes])
