"""Groups of the drop-in in the cluster registry, which the commands read."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import ray

import phalanx as px
from phalanx.backends.ray.cluster import ClusterReader
from phalanx.backends.ray.node_agents import RankObserver
from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from phalanx.display.registry_records import NoSuchGroup
from phalanx.session.session import session
from tests.support.fault_workers import within


@ray.remote
class Held(Worker):
    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def hold(self, path: str) -> None:
        print("held")
        while not os.path.exists(path):
            time.sleep(0.02)

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


def test_a_group_is_published_with_its_running_calls_until_it_is_deleted(
    ray_cluster: None, tmp_path: Path
) -> None:
    pool = RayResourcePool([2], use_gpu=False, name_prefix="observed")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Held), name_prefix="observed")
    refs = group.hold(str(tmp_path / "go"))
    cluster_reader = ClusterReader(ray.get_runtime_context().gcs_address)
    observer = RankObserver(cluster_reader.address)
    session.publisher.flush(10.0)
    (name,) = [one.name for one in cluster_reader.registry().groups if one.name.startswith("observed")]
    entry = cluster_reader.registry().find(name)
    ranks = entry.ranks
    busy = [{"hold"}, {"hold"}]
    seen = within(10.0, lambda: [set(status.methods.values()) for status in observer.inspect(ranks)] == busy)
    (tmp_path / "go").touch()
    ray.get(refs)
    log = observer.read(ranks[1], 0, 10_000).decode()
    del group
    gc.collect()  # its methods refer to it
    session.publisher.flush(10.0)

    assert within(10.0, lambda: not any(status.reachable for status in observer.inspect(ranks)))
    assert seen
    assert entry.pool == "observed"
    assert log.splitlines()[-1] == "held"
    with pytest.raises(NoSuchGroup):
        cluster_reader.registry().find(name)


@pytest.mark.slow
def test_a_role_keeps_its_ranks_alive_until_it_is_deleted_also_during_a_trace(ray_cluster: None) -> None:
    pool = RayResourcePool([2], use_gpu=False, name_prefix="roles")
    cluster_reader = ClusterReader(ray.get_runtime_context().gcs_address)

    def names() -> list[str]:
        gc.collect()
        session.publisher.flush(10.0)
        return [one.name for one in cluster_reader.registry().groups if one.name.startswith("roles")]

    with px.trace():
        classes = create_colocated_worker_cls({"held": RayClassWithInitArgs(Held)})
        group = RayWorkerGroup(pool, classes, name_prefix="roles")
        role = group.spawn({"held"})["held"]
        del group
        assert len(names()) == 1
        pids = role.execute_all_sync("held_pid")
        del role
        assert names() == []
        assert within(10.0, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
