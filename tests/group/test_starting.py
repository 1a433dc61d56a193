"""Processes that start in waves."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx as px
from phalanx.backends.ray import backend as ray_backend
from phalanx.backends.ray import private
from tests.support.fault_workers import within


@pytest.mark.slow
def test_ranks_started_in_waves_keep_their_order_and_a_start_that_times_out_leaves_none(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, made = ray_backend._create, list[Any]()
    monkeypatch.setattr(ray_backend, "WAVE", 2)
    monkeypatch.setattr(ray_backend, "_create", lambda *of: made.append(create(*of)) or made[-1])
    with px.ResourcePool([3, 2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, px.Worker)
        places = group.run(lambda worker: (worker.rank, worker.local_rank))
        assert places == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]
        with pytest.raises(px.PlacementError):
            px.WorkerGroup(pool, px.Worker, start_timeout=0.01)
        ids = list(map(private.actor_id, made[5:]))
        assert within(10.0, lambda: set(map(private.actor_states(), ids)) == {private.DEAD})
