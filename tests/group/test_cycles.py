"""Many groups one after another leave the machine as it was."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

import phalanx as px
from phalanx.testing import faults
from tests.support.fault_workers import Trouble, within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]
WARM_UP = 2


def holdings() -> dict[str, int]:
    """Return the resources that the driver and its cluster hold."""
    gc.collect()
    total = ray.cluster_resources().get("object_store_memory", 0.0)
    free = ray.available_resources().get("object_store_memory", 0.0)
    statm = Path("/proc/self/statm").read_text().split()
    return {
        "placement_groups": sum(g["state"] != "REMOVED" for g in placement_group_table().values()),
        "ranks": sum(_is_ours(pid) for pid in os.listdir("/proc") if pid.isdigit()),
        "store_bytes": int(total - free),
        "files": len(os.listdir("/proc/self/fd")),
        "rss": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def _is_ours(pid: str) -> bool:
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"ray::Trouble" in title or (b"reaper.py" in title and str(os.getpid()).encode() in title)
    return False


def one_cycle(number: int) -> None:
    with px.ResourcePool([4], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Trouble)
        assert group.ping() == [0, 1, 2, 3]
        if number % 5 == 4:
            rank = number // 5 % 4
            if number % 2:
                faults.kill(group, rank)
            else:
                faults.raises(group, rank, method="ping")
            with contextlib.suppress(px.PhalanxError):
                group.ping()


@pytest.mark.parametrize("cycles", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_repeated_groups_of_which_every_fifth_has_faults_leave_nothing_behind(cycles: int) -> None:
    for number in range(WARM_UP):
        one_cycle(number)
    before = holdings()

    for number in range(cycles):
        one_cycle(number)

    assert within(10.0, lambda: holdings()["store_bytes"] <= before["store_bytes"] + 2**20)
    grown = {name: count - before[name] for name, count in holdings().items()}
    assert grown["placement_groups"] == 0
    assert grown["ranks"] <= 0  # a process of the last warm-up may have been ending
    assert grown["files"] <= 5
    assert grown["rss"] <= 64 * 2**20
