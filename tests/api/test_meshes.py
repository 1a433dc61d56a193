"""Calls in mesh modes, to a group and to part of it: all ranks of a dp coordinate, or none."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.calls import compose as sender

SOAK_ON_RAY = True
MESH = px.Mesh(pp=2, dp=2, tp=2)  # rank = pp * 4 + dp * 2 + tp, Megatron's own order
LARGE = 100_000  # numbers; too large to travel inside the message


class Model(px.Worker):
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.register_mesh("rollout", {"dp": self.rank % 4, "tp": self.rank // 4})

    @px.register(px.Dispatch.mesh())
    def update(self, x: list[int]) -> list[int]:
        self.calls.append(x)
        return [self.rank, *x]

    @px.register(px.Dispatch.mesh(pp_as_dp=True))
    def staged(self, x: list[int]) -> list[int]:
        return [self.rank, *x]

    @px.register(px.Dispatch.mesh(), collect="none")
    def silent(self) -> Any:
        return threading.Lock()

    @px.register(px.Dispatch.mesh())
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(hashlib.sha256(x.numpy().tobytes()).hexdigest())
        return x * 2

    @px.register(px.Dispatch.MEGATRON_COMPUTE)
    def each(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @px.register(px.Dispatch.MEGATRON_PP_AS_DP)
    def each_stage(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @px.register(px.Dispatch.mesh("rollout"))
    def rollout(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, self.rank)], dim=1)

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
        yield px.WorkerGroup(pool, Model, mesh=MESH)


@pytest.fixture
def group(made: Any) -> Any:
    made.taken()
    return made


def test_indexing_a_rank_calls_its_complete_dp_coordinate_or_its_stage(group: Any) -> None:
    assert group[5].update([7]) == [4, 7]
    assert group.taken() == [[[7]], [[7]], [], [], [[7]], [[7]], [], []]
    assert group[5].staged([7]) == [4, 7]
    assert group[2].staged([7]) == [2, 7]
    assert group[0].silent() is None


def test_any_calls_one_complete_dp_coordinate(group: Any) -> None:
    assert group.any.update([7]) in ([4, 7], [6, 7])
    assert [len(calls) for calls in group.taken()] in ([1, 1, 0, 0] * 2, [0, 0, 1, 1] * 2)
    assert group[0:6].any.update([7]) == [4, 7]
    with pytest.raises(px.DispatchError, match="contain no complete dp coordinate"):
        group[0:3].any.update([7])


def test_a_call_of_part_of_a_dp_coordinate_is_refused_with_advice(group: Any) -> None:
    with pytest.raises(px.DispatchError, match=r"ranks \[0, 1, 4, 5\] are one dp coordinate.*group\[5\]"):
        group.rank(5).update([7])
    with pytest.raises(px.DispatchError, match=r"ranks \[0, 1\] of the dp coordinate.*group.any"):
        group[0:2].update([7])

    assert group.taken() == [[]] * 8


def test_a_method_without_a_mesh_mode_is_called_on_a_single_rank(group: Any) -> None:
    assert group.rank(5).my_rank() == group[5].my_rank() == 5
    assert group.rank(-1).run(lambda worker: worker.rank) == 7


def test_a_slice_of_complete_coordinates_splits_rows_over_them(eight: px.ResourcePool) -> None:
    group = px.WorkerGroup(eight[0:6], Model, mesh=px.Mesh(dp=3, tp=2))

    assert group[2:6].update([7, 8]) == [2, 7, 4, 8]
    assert group.taken() == [[], [], [[7]], [[7]], [[8]], [[8]]]
    alone = px.WorkerGroup(eight[0:2], Model, mesh=px.Mesh(dp=2))
    assert alone.rank(1).update([7]) == [1, 7]  # without peers, a process is its coordinate


def test_one_result_per_dp_coordinate_comes_from_tp_0_of_the_last_stage_in_dp_order(group: Any) -> None:
    assert group.each(["a", "b"]) == [(4, "a"), (6, "b")]
    assert group.each_stage(["a", "b", "c", "d"]) == [(0, "a"), (4, "b"), (2, "c"), (6, "d")]
    with pytest.raises(px.DispatchError, match=r"each.*a list of 3 elements.*dp_size = 2"):
        group.each(["a", "b", "c"])


@pytest.mark.parametrize("numbers", [6, LARGE], ids=["small", "large"])
def test_a_shard_is_encoded_and_stored_once_for_all_of_its_peers_and_rows_keep_their_order(
    group: Any, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, encoded, stored = torch.arange(numbers), list[Any](), list[Any]()
    encode, put = sender.encode, group.core.backend.put
    monkeypatch.setattr(sender, "encode", lambda value, **kw: (encoded.append(value), encode(value, **kw))[1])
    monkeypatch.setattr(group.core.backend, "put", lambda value: (stored.append(value), put(value))[1])

    assert torch.equal(group.rows(x), 2 * x)

    assert len(encoded) == 2
    assert len(stored) == (2 if numbers == LARGE else 0)
    halves = [hashlib.sha256(half.numpy().tobytes()).hexdigest() for half in x.chunk(2)]
    assert group.taken() == [[halves[MESH.coordinate(rank, "dp")]] for rank in range(8)]


def test_a_mesh_registered_by_workers_has_its_own_dp_coordinates(group: Any) -> None:
    assert group.rollout(torch.arange(4)).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert (group.mesh("default"), group.mesh("rollout").shape) == (MESH, (4, 2))
    with pytest.raises(px.DispatchError, match=r"no mesh 'critic' \(it has: default, rollout\)"):
        group.mesh("critic")
