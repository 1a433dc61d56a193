"""Calls to part of a group whose methods have a mesh mode: all ranks of a dp coordinate, or none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px

SOAK_ON_RAY = True


class Model(px.Worker):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    @px.register(px.Dispatch.mesh())
    def update(self, x: list[int]) -> list[int]:
        self.calls.append(x)
        return [self.rank, *x]

    @px.register(px.Dispatch.mesh(leader_only=True))
    def led(self, x: Any, scale: int = 1) -> tuple[Any, int]:
        self.calls.append((x, scale))
        return x, scale

    @px.register(px.Dispatch.mesh(pp_as_dp=True))
    def staged(self, x: list[int]) -> list[int]:
        return [self.rank, *x]

    @px.register(px.Dispatch.mesh(), collect="none")
    def silent(self) -> Any:
        return threading.Lock()

    @px.register
    def taken(self) -> list[Any]:
        taken, self.calls = self.calls, []
        return taken

    @px.register
    def my_rank(self) -> int:
        return self.rank


@pytest.fixture(scope="module")
def made(backend: str) -> Iterator[Any]:
    """Ranks 0 to 7 as pp, dp, tp = 2 each: dp 0 is ranks 0, 1, 4, 5, and its collector rank 4."""
    with px.ResourcePool([8], use_gpu=False) as pool:
        yield px.WorkerGroup(pool, Model, mesh=px.Mesh(pp=2, dp=2, tp=2))


@pytest.fixture
def group(made: Any) -> Any:
    made.taken()
    return made


def test_a_rank_stands_for_its_dp_coordinate_or_its_stage(group: Any) -> None:
    assert group[5].update([7]) == [4, 7]
    assert group.taken() == [[[7]], [[7]], [], [], [[7]], [[7]], [], []]
    assert group[5].staged([7]) == [4, 7]
    assert group[2].staged([7]) == [2, 7]
    assert group[0].silent() is None


def test_rows_for_leaders_alone_go_unchanged_to_the_leader_of_the_coordinate(group: Any) -> None:
    batch = {"a": [1, 2, 3], "b": [1, 2]}  # of no one number of rows

    group[7].led(batch, scale=3)

    assert group.taken()[2:4] == [[(batch, 3)], [(None, 3)]]


def test_any_calls_one_dp_coordinate_whole(group: Any) -> None:
    assert group.any.update([7]) in ([4, 7], [6, 7])
    assert [len(calls) for calls in group.taken()] in ([1, 1, 0, 0] * 2, [0, 0, 1, 1] * 2)
    assert group[0:6].any.update([7]) == [4, 7]
    with pytest.raises(px.DispatchError, match="hold no dp coordinate whole"):
        group[0:3].any.update([7])


def test_part_of_a_coordinate_is_refused_with_advice(group: Any) -> None:
    with pytest.raises(px.DispatchError, match=r"ranks \[0, 1, 4, 5\] are one dp coordinate.*group\[5\]"):
        group.rank(5).update([7])
    with pytest.raises(
        px.DispatchError, match=r"ranks \[0, 1\] of the dp coordinate.*group\[i\] or group.any"
    ):
        group[0:2].update([7])

    assert group.taken() == [[]] * 8


def test_other_modes_reach_one_process(group: Any) -> None:
    assert group.rank(5).my_rank() == group[5].my_rank() == 5
    assert group.rank(-1).run(lambda worker: worker.rank) == 7


def test_a_slice_of_complete_coordinates_splits_rows_over_them(backend: str) -> None:
    with px.ResourcePool([6], use_gpu=False) as pool:
        group = px.WorkerGroup(pool, Model, mesh=px.Mesh(dp=3, tp=2))

        assert group[2:6].update([7, 8]) == [2, 7, 4, 8]
        assert group.taken() == [[], [], [[7]], [[7]], [[8]], [[8]]]
        assert group[4:6].led([1, 2]) == ([1, 2], 1)
        assert group.taken()[4:] == [[([1, 2], 1)], [(None, 1)]]
        alone = px.WorkerGroup(pool[0:2], Model, mesh=px.Mesh(dp=2))
        assert alone.rank(1).update([7]) == [1, 7]  # without peers, a process is its coordinate
