"""Pools: shapes, views, groups on slots, and errors of requests that cannot be met."""

from __future__ import annotations

import os
import pickle
import threading
import time
from typing import Any

import pytest

import phalanx as px
from phalanx.backends import inline
from phalanx.backends.backend_types import Reservation, ReserveRequest
from phalanx.testing.scripted import scripted

SLOW_ON_RAY = True


class Where(px.Worker):
    @px.register
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.local_rank, self.local_world_size

    @px.register
    def accelerators(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def test_a_pool_can_be_split_and_closing_a_view_does_not_release_its_slots(backend: str) -> None:
    with px.ResourcePool([4, 2], use_gpu=False) as pool:
        assert pool.local_ranks == (0, 1, 2, 3, 0, 1)
        assert pool.local_world_sizes == (4, 4, 4, 4, 2, 2)
        assert [part.world_size for part in pool.split(2)] == [2, 2, 2]
        assert [part.world_size for part in pool.split([5, 1])] == [5, 1]
        pool[0:1].close()
        assert not pool.closed
        assert px.WorkerGroup(pool[0:1], Where).place() == [(0, 0, 1)]


def test_ranks_are_ordered_by_accelerator_whichever_view_is_used_first(backend: str) -> None:
    with px.ResourcePool([4], use_gpu=True) as pool:
        part = pool[1:3]
        seen_by_part = px.WorkerGroup(part, Where).accelerators()
        seen_by_all = px.WorkerGroup(pool, Where).accelerators()
        assert seen_by_part == seen_by_all[1:3]
        assert [int(i) for i in seen_by_all] == sorted(int(i) for i in seen_by_all)


@pytest.mark.slow_on_cluster
def test_groups_on_a_merged_pool_share_the_accelerators_of_its_parts(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=True) as a, px.ResourcePool([1, 1], use_gpu=True) as b:
        merged = a + b
        whole = px.WorkerGroup(merged, Where)
        assert whole.place() == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
        assert whole.accelerators()[0] == px.WorkerGroup(a, Where).accelerators()[0]
        assert (a + b).world_size == 3


def test_a_group_above_max_colocate_count_is_refused_and_a_closed_pool_closes_its_groups(
    backend: str,
) -> None:
    with px.ResourcePool([1], use_gpu=True, max_colocate_count=1) as pool:
        first = px.WorkerGroup(pool, Where, name="first")
        assert [row["groups"] for row in pool.explain().to_dict()["rows"]] == [["first"]]
        assert "first" in str(px.debug.status(backend))
        with pytest.raises(px.PlacementError, match=r"max_colocate_count=1.*first"):
            px.WorkerGroup(pool, Where)
        first.close()
        second = px.WorkerGroup(pool, Where)
        assert second.place() == [(0, 0, 1)]
    pool.close()
    assert second.closed
    with pytest.raises(px.PlacementError, match="closed"):
        px.WorkerGroup(pool, Where)


def test_a_pool_that_can_never_be_placed_fails_at_once_with_a_table(backend: str) -> None:
    started = time.monotonic()
    with pytest.raises(px.PlacementError, match=r"(?s)16 slots.*GPU.*->"):  # advice follows the arrow
        px.ResourcePool([16], use_gpu=True, timeout=60)
    assert time.monotonic() - started < 30  # far under the timeout: it did not wait


def test_a_pool_waits_for_busy_accelerators_until_its_timeout_and_names_the_holder(ray_cluster: None) -> None:
    with (
        px.ResourcePool([8], use_gpu=True, name_prefix="holder", backend="ray"),
        pytest.raises(px.PlacementError, match=r"(?s)within timeout=0\.3.*holder"),
    ):
        px.ResourcePool([2], use_gpu=True, timeout=0.3, backend="ray")


@pytest.mark.slow
def test_a_slot_whose_accelerator_another_actor_uses_is_named_by_the_error(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from phalanx.backends.ray import placement_groups as placement

    with px.ResourcePool([2], use_gpu=True, backend="ray") as pool:
        reservations = {name: holding.reservation for name, holding in pool.holdings.items()}
        in_slot_1 = placement.strategy(pool.slots[1], reservations)
        stranger = ray.remote(Where).options(num_cpus=0, num_gpus=1, scheduling_strategy=in_slot_1).remote()
        ray.get(stranger.accelerators.remote())
        monkeypatch.setattr(placement, "_PROBED_WITHIN_S", 2.0)

        with pytest.raises(px.PlacementError, match=r"slot 1 of block 0 of pool .* 1 GPU .*`ray status`"):
            pool[0:1]
        monkeypatch.undo()
        ray.kill(stranger)

        assert len(pool[0:1]) == 1


def test_a_rank_sees_all_accelerators_of_its_slot(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=True, accelerators_per_slot=4) as pool:
        seen = px.WorkerGroup(pool, Where).accelerators()
        assert len(set(seen[0].split(","))) == 4


def test_extra_resources_are_reserved_until_the_group_closes_and_refused_if_unavailable(
    ray_cluster: None,
) -> None:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Where, num_cpus=1, memory=1e8, name="greedy")
        held = str(px.debug.status("ray"))
        group.close()
        assert "greedy-extras" in held
        assert "greedy-extras" not in str(px.debug.status("ray"))
        with pytest.raises(px.PlacementError, match="unobtainium"):
            px.WorkerGroup(pool, Where, resources={"unobtainium": 1})


def test_a_second_close_repeats_a_failed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    pool = px.ResourcePool([1], use_gpu=False, backend="inline")
    backend, before = pool.backend_api, len(pool.backend_api.holders())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(backend, "release", interrupted)
        pool.close()
    pool.close()

    assert len(backend.holders()) == before - 1


def test_pools_of_two_clusters_cannot_be_merged_and_pools_cannot_be_pickled() -> None:
    with px.ResourcePool([1], use_gpu=False, backend="inline") as first:
        with scripted(lambda what, number: "fine"), pytest.raises(px.DeclarationError, match="cannot merge"):
            first + px.ResourcePool([1], use_gpu=False, backend="inline")
        with pytest.raises(px.DeclarationError, match="attach"):
            pickle.dumps(first)


def test_concurrent_pools_of_two_threads_get_different_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, made = inline.InlineBackend({"GPU": 2.0}), list[Reservation]()

    def reserve() -> None:
        made.append(backend.reserve(ReserveRequest("pool", (1,), {"GPU": 1.0})))

    other = threading.Thread(target=reserve)

    def while_another_reserves(*args: Any) -> Reservation:
        if other.ident is None:
            other.start()
            other.join(0.2)
        return Reservation(*args)

    monkeypatch.setattr(inline, "Reservation", while_another_reserves)
    reserve()
    other.join(10)

    assert sorted(held.ids[0][0] for held in made) == [("0",), ("1",)]


class ClosesItsGroup(px.Worker):
    """Closes its own group during a start, as another thread may."""

    group: px.WorkerGroup | px.ResourcePool | None = None
    error: Exception | None = None

    def __init__(self) -> None:
        if ClosesItsGroup.group is not None:
            ClosesItsGroup.group.close()
            if ClosesItsGroup.error is not None:
                raise ClosesItsGroup.error


@pytest.mark.parametrize("error", [None, RuntimeError("its slots are gone")])
def test_a_group_closed_during_a_restart_leaves_no_reservation(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(ClosesItsGroup, "error", error)
    group = px.WorkerGroup(here, ClosesItsGroup, num_cpus=1, name="closing")
    assert any("closing-extras" in holder.name for holder in here.backend_api.holders())
    monkeypatch.setattr(ClosesItsGroup, "group", group)
    with pytest.raises(px.GroupClosed, match="restarted"):
        group.restart()
    assert not any("closing-extras" in holder.name for holder in here.backend_api.holders())


def test_a_failed_start_in_a_closed_pool_raises_group_closed(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClosesItsGroup, "group", here)
    monkeypatch.setattr(ClosesItsGroup, "error", RuntimeError("its slots are gone"))
    with pytest.raises(px.GroupClosed, match="closed while it was to be started"):
        px.WorkerGroup(here, ClosesItsGroup)
