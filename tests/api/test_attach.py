"""Detached groups outlive their driver and are found again by name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

import phalanx as px
from phalanx.backends.ray.cluster import ClusterReader
from phalanx.session.session import session
from tests.support.fault_workers import within

pytestmark = pytest.mark.slow

WORKERS = """
import phalanx as px


class Counter(px.Worker):
    def __init__(self, folder):
        self.count = 0
        self.folder = folder

    def close(self):
        if self.folder:
            open(f"{self.folder}/closed-{self.rank}", "w").close()

    @px.register
    def up(self, by: int) -> int:
        self.count += by
        return self.count


def detached(name, folder=None, **options):
    pool = px.ResourcePool([2], use_gpu=False, detached=True)
    return px.WorkerGroup(pool, Counter.bind(folder), name=name, detached=True, **options)
"""


@pytest.fixture
def drive(ray_cluster: None) -> Callable[[str], str]:
    """Return a function that runs a script as another driver on the session's cluster and returns its output."""
    address = ray.get_runtime_context().gcs_address

    def run(script: str) -> str:
        head = f"{WORKERS}\npx.init(address={address!r})\n"
        done = subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(script)],
            env={**os.environ, "PHALANX_BACKEND": "ray"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("leave", [pytest.param("", marks=pytest.mark.soak), "import ray; ray.shutdown()"])
def test_another_driver_attaches_to_a_detached_group_and_closes_it(
    drive: Callable[[str], str], leave: str, tmp_path: Path
) -> None:
    drive(f"""
        detached("left-behind", {str(tmp_path)!r}, num_cpus=1).up(5)
        {leave}
    """)
    try:
        out = drive("""
            group = px.attach("left-behind")
            print(group.up(1), group[1].up(1))
        """)
        assert out.strip() == "[6, 6] 7"
    finally:
        px.attach("left-behind").close(pool=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]
    reserved = [one for one in placement_group_table().values() if one["state"] == "CREATED"]
    assert not [one["name"] for one in reserved if "left-behind" in one["name"]]
    with pytest.raises(px.PlacementError, match="no detached group"):
        px.attach("left-behind")


def test_attach_finds_a_group_whose_first_rank_was_replaced(drive: Callable[[str], str]) -> None:
    drive("""
        group = detached("replaced")
        group.up(5)
        px.replace_ranks(group, 0, state="none")
    """)
    try:
        assert px.attach("replaced").up(1) == [1, 6]
    finally:
        px.attach("replaced").close(pool=True)


def test_a_detached_group_with_a_dead_first_rank_can_be_closed_and_recreated(
    drive: Callable[[str], str],
) -> None:
    make = "print(detached('unlucky').up(5))"
    drive(make)
    group, backend = px.attach("unlucky"), session.get_backend()
    assert group.up(1) == [6, 6]
    first, second = group.core.endpoints
    backend.kill([first])

    left = px.attach("unlucky")
    with pytest.raises(px.GroupBroken, match=r"close\(pool=True\) ends it.*ranks \[0\] have ended") as raised:
        left[1].up(1)
    assert (left.state, raised.value.lost) == ("broken", True)
    left.close(pool=True)
    assert backend.dead_of([second]) == [0]

    assert drive(make).strip() == "[5, 5]"
    px.attach("unlucky").close(pool=True)


def test_a_second_detached_group_of_one_name_is_refused_and_the_first_stays_with_its_run(
    drive: Callable[[str], str],
) -> None:
    make = "detached('taken')"
    drive(make)
    cluster = ClusterReader(ray.get_runtime_context().gcs_address)
    run = cluster.registry().find("taken").run
    try:
        assert within(10, lambda: (run, True) in [(one.run, one.ended) for one in cluster.registry().runs])
        with pytest.raises(AssertionError, match=r"detached group 'taken'.*px\.attach\('taken'\)"):
            drive(make)
        assert px.attach("taken").up(1) == [1, 1]
    finally:
        px.attach("taken").close(pool=True)


def test_attached_ranks_keep_an_order_that_differs_from_that_of_their_slots(
    drive: Callable[[str], str],
) -> None:
    """Accelerators can cause such an order. It is patched in, because this test has no devices."""
    drive("""
        import phalanx.pools.pool as pools

        orders = iter([(1, 0)])
        pools.order_ranks = lambda slots, facts: next(orders, tuple(range(len(slots))))
        group = detached("turned")
        assert [group[rank].up(rank + 5) for rank in range(2)] == [5, 6]
        px.replace_ranks(group, 1, state="none")
        assert group.up(1) == [6, 1]
    """)
    try:
        assert px.attach("turned").up(1) == [7, 2]
    finally:
        px.attach("turned").close(pool=True)
