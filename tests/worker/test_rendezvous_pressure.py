"""Groups that start concurrently while another process takes ports, and devices that ranks see."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import phalanx as px

pytestmark = pytest.mark.slow
AT_A_TIME, KEPT, EVERY_S = 40, 4000, 0.05


def listening_ports() -> set[int]:
    """Return ports in state LISTEN (0A) of every process of this machine."""
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"}


def take(port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_server(("", port))
    return None


def eat_ports() -> None:
    """Take ports until the input ends: free ports, and neighbors of ports that other processes listen on."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = 2 * KEPT if hard == resource.RLIM_INFINITY else min(hard, 2 * KEPT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    held: deque[socket.socket] = deque()
    own: set[int] = set()
    eaten = 0
    print("eating", flush=True)
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        others = listening_ports() - own
        near = [port + 1 for port in sorted(others) if 1024 < port < 65535]
        for port in [0] * AT_A_TIME + near:
            taken = take(port)
            if taken is not None:
                eaten += 1
                held.append(taken)
                own.add(taken.getsockname()[1])
        while len(held) > min(KEPT, limit - 100):
            given_back = held.popleft()
            own.discard(given_back.getsockname()[1])
            given_back.close()
    print(eaten, flush=True)


class Member(px.Worker):
    """Forms torch's default process group as any training script does."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @px.register(px.Dispatch.ONE_TO_ALL)
    def total(self, base: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([base + self.rank])
        dist.all_reduce(value)
        return value.item()


@pytest.fixture
def port_eater() -> Iterator[subprocess.Popen[str]]:
    command, root = [sys.executable, "-m", __name__], Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "eating\n"
        yield process
        process.kill()


def start_and_use(number: int) -> list[float]:
    with (
        px.ResourcePool([2], use_gpu=False, timeout=500) as pool,
        px.WorkerGroup(pool, Member, start_timeout=500) as group,
    ):
        return group.total(10.0 * number)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [5, pytest.param(20, marks=pytest.mark.soak)])
def test_groups_start_concurrently_while_another_process_takes_ports(
    ray_cluster: None, port_eater: subprocess.Popen[str], groups: int
) -> None:
    with ThreadPoolExecutor(groups) as threads:
        totals = list(threads.map(start_and_use, range(groups)))
    eaten, _ = port_eater.communicate("\n")
    assert totals == [[20.0 * number + 1] * 2 for number in range(groups)]
    assert int(eaten) > 1000


def test_a_rank_sees_its_own_device_or_on_request_all_devices_of_its_group_on_the_node(
    ray_cluster: None,
) -> None:
    def view(worker: px.Worker) -> tuple[str, int, int]:
        return os.environ["CUDA_VISIBLE_DEVICES"], int(os.environ["LOCAL_RANK"]), worker.local_rank

    with px.ResourcePool([3], use_gpu=True) as pool:
        with px.WorkerGroup(pool, px.Worker) as group:
            views = group.run(view)
        devices = {device for device, _, _ in views}
        assert len(devices) == 3 and "," not in "".join(devices)
        assert [(index, place) for _, index, place in views] == [(0, 0), (0, 1), (0, 2)]

        with px.WorkerGroup(pool, px.Worker, visible_devices="node") as group:
            views = group.run(view)
            own = [line[3].split()[1] for line in group.explain().rows]
        (shown,) = {tuple(devices.split(",")) for devices, _, _ in views}
        assert [shown[index] for _, index, _ in views] == own
        assert sorted(shown) == sorted(own)


if __name__ == "__main__":
    eat_ports()
