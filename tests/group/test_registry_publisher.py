"""Records of its run that a driver publishes on the cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray

import phalanx as px
from phalanx.backends.ray.cluster import ClusterReader
from phalanx.display.registry_records import GroupRecord
from phalanx.session.session import session
from tests.support.fault_workers import Trouble, lose, within


@pytest.fixture
def cluster_reader(ray_cluster: None) -> ClusterReader:
    return ClusterReader(ray.get_runtime_context().gcs_address)


def seen(cluster_reader: ClusterReader, name: str) -> list[GroupRecord]:
    assert session.publisher.flush(10.0)
    return [group for group in cluster_reader.registry().groups if group.name == name]


def test_a_group_is_published_with_its_state_cause_and_ranks_until_it_is_closed(
    cluster_reader: ClusterReader,
) -> None:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Trouble, name="fragile")
        (ready,) = seen(cluster_reader, "fragile")
        before = [endpoint.facts.pid for endpoint in group.core.endpoints]
        lose(group, 1, call=group.ping)
        (broken,) = seen(cluster_reader, "fragile")
        group.restart()
        (back,) = seen(cluster_reader, "fragile")

    assert (ready.run, ready.state, ready.epoch) == (session.run_id, "ready", 0)
    assert "ping" in ready.methods[""]
    assert [rank.pid for rank in ready.ranks] == before
    assert (broken.state, "rank 1" in (broken.cause or "")) == ("broken", True)
    assert (back.state, back.epoch, back.cause) == ("ready", 1, None)
    assert {rank.pid for rank in back.ranks}.isdisjoint(before)
    assert seen(cluster_reader, "fragile") == []


def test_records_of_a_killed_driver_are_removed_by_the_next_reader(cluster_reader: ClusterReader) -> None:
    script = (
        "import sys, phalanx as px\n"
        "from phalanx.session.session import session\n"
        "px.init(address=sys.argv[1])\n"
        "group = px.WorkerGroup(px.ResourcePool([1], use_gpu=False), px.Worker, name='orphan')\n"
        "session.publisher.flush(10.0)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, cluster_reader.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PHALANX_BACKEND": "ray"},
    ) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        alive = [group.name for group in cluster_reader.registry().groups]
        driver.kill()

    assert "orphan" in alive
    assert within(10.0, lambda: "orphan" not in [group.name for group in cluster_reader.registry().groups])
