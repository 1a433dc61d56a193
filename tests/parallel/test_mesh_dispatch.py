"""Mesh dispatch as a group of 8 sees it: tp 2 x pp 2 x dp 2."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.calls import compose as sender

MESH = px.Mesh(pp=2, dp=2, tp=2)  # rank = pp * 4 + dp * 2 + tp, Megatron's own order
COLLECTED = [4, 6]  # pp 1, tp 0 of dp 0 and of dp 1
LARGE = 100_000  # numbers; far above what travels inside the message


class Recorder(px.Worker):
    """Notes what it got; registers a mesh of its own making under the name "rollout"."""

    def __init__(self) -> None:
        super().__init__()
        self.register_mesh("rollout", {"dp": self.rank % 4, "tp": self.rank // 4})
        self.seen: Any = None

    @px.register(px.Dispatch.mesh())
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = hashlib.sha256(x.numpy().tobytes()).hexdigest()
        return x * 2

    @px.register(px.Dispatch.MEGATRON_COMPUTE)
    def each(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @px.register(px.Dispatch.MEGATRON_PP_AS_DP)
    def each_stage(self, x: Any) -> tuple[int, Any]:
        return self.rank, x

    @px.register(px.Dispatch.mesh(leader_only=True))
    def led(self, x: torch.Tensor) -> list[int]:
        self.seen = None if x is None else x.tolist()
        return [self.rank]

    @px.register(px.Dispatch.mesh("rollout"))
    def rollout(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, self.rank)], dim=1)

    @px.register(px.Dispatch.mesh(balance="lengths"))
    def balanced(self, ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
        self.seen = float(lengths.sum())
        return {"ids": ids, "rank": torch.full_like(ids, self.rank)}

    @px.register(px.Dispatch.mesh(balance="lengths", group_size=4))
    def balanced_by_prompt(self, ids: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
        self.seen = ids.tolist()
        return {"ids": ids, "rank": torch.full_like(ids, self.rank)}


class Confused(px.Worker):
    """Ranks 2 and 3 hold the same place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_mesh("default", {"dp": min(self.rank, 2)})

    @px.register(px.Dispatch.mesh())
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.fixture(scope="module")
def group() -> Iterator[px.WorkerGroup]:
    with (
        px.ResourcePool([8], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, Recorder, mesh=MESH) as made,
    ):
        yield made


def seen(group: px.WorkerGroup) -> list[Any]:
    return group.run(lambda worker: worker.seen)


def test_one_result_per_dp_coordinate_comes_from_tp_0_of_the_last_stage_in_dp_order(
    group: px.WorkerGroup,
) -> None:
    assert group.each(["a", "b"]) == [(4, "a"), (6, "b")]
    assert group.each_stage(["a", "b", "c", "d"]) == [(0, "a"), (4, "b"), (2, "c"), (6, "d")]
    with pytest.raises(px.DispatchError, match=r"each.*a list of 3 elements.*dp_size = 2"):
        group.each(["a", "b", "c"])


@pytest.mark.parametrize("numbers", [6, LARGE], ids=["small", "large"])
def test_a_piece_is_encoded_and_stored_once_for_all_of_its_peers_and_rows_come_back_in_order(
    group: px.WorkerGroup, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, encoded, stored = torch.arange(numbers), list[Any](), list[Any]()
    encode, put = sender.encode, group.core.backend.put
    monkeypatch.setattr(sender, "encode", lambda value, **kw: (encoded.append(value), encode(value, **kw))[1])
    monkeypatch.setattr(group.core.backend, "put", lambda value: (stored.append(value), put(value))[1])

    assert torch.equal(group.rows(x), 2 * x)

    assert len(encoded) == 2
    assert len(stored) == (2 if numbers == LARGE else 0)
    halves = [hashlib.sha256(half.numpy().tobytes()).hexdigest() for half in x.chunk(2)]
    assert seen(group) == [halves[MESH.coordinate(rank, "dp")] for rank in range(8)]


def test_every_rank_is_called_with_fewer_rows_than_coordinates_and_only_leaders_get_their_pieces(
    group: px.WorkerGroup,
) -> None:
    group.run(lambda worker: setattr(worker, "seen", None))
    group.rows(torch.arange(1))
    assert None not in seen(group)
    group.led(torch.arange(4))
    assert seen(group) == [[0, 1], None, [2, 3], None, None, None, None, None]


def test_a_mesh_that_the_workers_registered_has_its_own_dp_coordinates(group: px.WorkerGroup) -> None:
    assert group.rollout(torch.arange(4)).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert (group.mesh("default"), group.mesh("rollout").shape) == (MESH, (4, 2))
    with pytest.raises(px.DispatchError, match=r"no mesh 'critic' \(it has: default, rollout\)"):
        group.mesh("critic")


def test_places_that_do_not_tile_the_group_are_an_error_that_names_the_ranks() -> None:
    with (
        px.ResourcePool([4], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, Confused) as confused,
        pytest.raises(px.PhalanxError, match="ranks 2 and 3 both report dp=2"),
    ):
        confused.rows(torch.arange(4))


def lognormal(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).lognormal(mean=6.0, sigma=1.0, size=rows).astype(int))


def test_balanced_rows_come_back_in_their_order_from_ranks_with_lengths_even_to_2_percent(
    group: px.WorkerGroup,
) -> None:
    lengths = lognormal(1000)
    result = group.balanced(torch.arange(1000), lengths)
    assert max(seen(group)) <= 1.02 * float(lengths.sum()) / 2
    assert result["ids"].tolist() == list(range(1000))
    assert set(result["rank"].tolist()) == set(COLLECTED)


def test_rows_that_belong_together_stay_together_when_balanced(group: px.WorkerGroup) -> None:
    result = group.balanced_by_prompt(torch.arange(1000), lognormal(1000))
    by_prompt = result["rank"].reshape(250, 4)
    assert torch.equal(by_prompt, by_prompt[:, :1].expand(250, 4))
    with pytest.raises(px.DispatchError, match=r"6 rows.*group_size = 4"):  # which fill no groups
        group.balanced_by_prompt(torch.arange(6), torch.arange(6))
