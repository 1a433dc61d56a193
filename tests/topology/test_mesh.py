"""Ranks and coordinates, and the sets of ranks that mesh dispatch uses."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys

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


def test_first_axis_is_slowest():
    mesh = Mesh(dp=2, tp=3)

    assert [mesh.coordinates(rank) for rank in (0, 2, 3)] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 2},
        {"dp": 1, "tp": 0},
    ]


def test_repr_reads_as_the_call_that_makes_it():
    assert repr(Mesh(dp=2, pp=1, tp=2)) == "Mesh(dp=2, pp=1, tp=2)"


def test_axes_shape_and_sizes():
    mesh = Mesh(dp=2, pp=1, tp=2)

    assert (mesh.axes, mesh.shape, mesh.world_size) == (("dp", "pp", "tp"), (2, 1, 2), 4)
    assert (mesh.size(), mesh.size("tp"), mesh.size("cp")) == (4, 2, 1)


def test_an_axis_may_have_any_name():
    assert Mesh(self=2, rank=3).coordinate(5, "rank") == 2


def test_the_rest_is_resolved_from_the_world_size():
    assert Mesh(dp=-1, tp=2).resolve(8) == Mesh(dp=4, tp=2)


def test_resolving_a_full_mesh_of_the_right_size_gives_itself():
    assert Mesh(dp=4, tp=2).resolve(8) == Mesh(dp=4, tp=2)


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


@pytest.mark.parametrize("size", [0, -2, 1.5, True, "2", None])
def test_a_size_that_is_no_count_is_refused(size):
    with pytest.raises(DeclarationError, match="whole number from 1"):
        Mesh(dp=size)


def test_two_axes_cannot_both_be_the_rest():
    with pytest.raises(DeclarationError, match="dp, tp are all -1"):
        Mesh(dp=-1, tp=-1)


def test_a_mesh_without_axes_is_refused():
    with pytest.raises(DeclarationError, match="name at least one"):
        Mesh()


def test_an_axis_name_must_be_an_identifier():
    with pytest.raises(DeclarationError, match="identifier"):
        Mesh.of({"d p": 2})


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


def test_coordinates_in_rank_order_equal_the_declared_mesh():
    mesh = Mesh(pp=2, dp=2)

    assert Mesh.from_coordinates([mesh.coordinates(r) for r in range(4)]) == mesh


def test_pp_as_dp_puts_dp_first():
    mesh = Mesh(pp=2, dp=4)  # rank = pp * 4 + dp

    assert mesh.dp_groups(PP_AS_DP) == ((0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,))


def test_pp_as_dp_collects_from_every_stage():
    mesh = Mesh(pp=2, dp=2, tp=2)

    assert mesh.collectors(PP_AS_DP) == (0, 4, 2, 6)


def test_megatron_layout_collects_from_the_last_stage():
    mesh = Mesh(pp=2, dp=2, cp=1, tp=2)

    assert (mesh.dp_groups(), mesh.collectors()) == (((0, 1, 4, 5), (2, 3, 6, 7)), (4, 6))


def test_without_a_dp_axis_all_ranks_are_one_coordinate():
    mesh = Mesh(pp=2, tp=2)

    assert (mesh.dp_groups(), mesh.collectors(), mesh.leaders()) == (((0, 1, 2, 3),), (2,), (0,))


def test_naming_a_dp_axis_twice_is_refused():
    with pytest.raises(DispatchError, match="twice"):
        Mesh(dp=2).dp_groups(("dp", "dp"))


def test_a_slice_and_the_peers_along_an_axis():
    mesh = Mesh(dp=2, pp=2, tp=2)

    assert mesh.ranks(dp=1, tp=0) == (4, 6)
    assert mesh.peers(5, "pp") == (5, 7)
    assert mesh.peers(5, "cp") == (5,)


def test_a_rank_outside_the_mesh_is_refused():
    with pytest.raises(DispatchError, match=r"rank 4 is not in Mesh\(dp=4\); expected 0 to 3"):
        Mesh(dp=4).coordinates(4)


def test_a_rank_needs_a_coordinate_for_each_axis():
    with pytest.raises(DispatchError, match="no coordinate for tp"):
        Mesh(dp=2, tp=2, pp=1).rank(dp=0)


@pytest.mark.parametrize("fixed", [{"dp": 2}, {"dp": -1}, {"dp": 0.5}, {"dp": "a"}, {"typo": 1}])
def test_a_coordinate_out_of_range_is_refused_with_the_sizes(fixed):
    with pytest.raises(DispatchError, match=r"'dp': 2"):
        Mesh(dp=2).ranks(**fixed)


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ([{"dp": 0}, {"dp": 1}, {"dp": 1}], ["ranks 1, 2 all report dp=1"]),
        ([{"dp": 0, "tp": 0}, {"dp": 0, "tp": 1}, {"dp": 1, "tp": 0}], ["no rank reports dp=1, tp=1"]),
        ([{"dp": 0}, {"dp": 1, "tp": 0}], ["rank 0 report axes (dp)", "rank 1 report axes (dp, tp)"]),
        ([{"dp": 0}, {"dp": 10**12}], ["dp=1000000000000, reported by rank 1"]),
        ([{"dp": 0}, {"dp": -1}], ["rank 1 reports dp=-1"]),
        ([], ["one dict"]),
    ],
)
def test_coordinates_that_do_not_tile_name_the_ranks_in_conflict(reported, words):
    with pytest.raises(DeclarationError) as caught:
        Mesh.from_coordinates(reported)

    assert all(word in str(caught.value) for word in words)


def test_ranks_that_hold_an_axis_to_have_different_sizes_are_named():
    sizes = [{"dp": 2}, {"dp": 4}]

    with pytest.raises(DeclarationError, match=r"rank 0 hold dp .* size 2; rank 1 hold dp .* size 4"):
        Mesh.from_coordinates([{"dp": 0}, {"dp": 1}], sizes=sizes)


def test_agreed_sizes_that_no_rank_fills_are_a_conflict():
    with pytest.raises(DeclarationError, match="no rank reports dp=2"):
        Mesh.from_coordinates([{"dp": 0}, {"dp": 1}, {"dp": 1}], sizes=[{"dp": 3}] * 3)


def test_a_coordinate_outside_the_reported_sizes_names_the_rank():
    with pytest.raises(DeclarationError, match="rank 1 reports dp=3, outside"):
        Mesh.from_coordinates([{"dp": 0}, {"dp": 3}], sizes=[{"dp": 2}] * 2)


def test_importing_the_mesh_loads_nothing_heavy():
    code = "import sys, phalanx.topology.mesh; print(sorted({'ray', 'torch', 'numpy'} & set(sys.modules)))"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert loaded.stdout.strip() == "[]"
