"""Ends of a driver, after which nothing of its groups is left within 5 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest
import ray
import torch

import phalanx as px
from tests.support import fault_workers
from tests.support.fault_workers import is_there, left_of_driver, within

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Producer(fault_workers.Trouble):
    @px.register
    def put_two(self, channel: px.Channel) -> list[int]:
        return channel.put_many([bytes(1 << 20)] * 2)


def sync_weights(group: px.WorkerGroup) -> None:
    """Have rank 0 send weights to rank 1, through shared memory."""
    weights = {"w": torch.ones(1 << 20)}
    group[:1].run(lambda worker: px.weights.publish(worker, "w", weights))
    group[1:].run(lambda worker: px.weights.accept(worker, "w", weights))
    px.WeightSync(group[:1], group[1:], "w")()


def main(address: str, ending: str) -> None:
    """Run a driver that prints the processes that it started, and ends by ``ending``."""
    cloudpickle.register_pickle_by_value(fault_workers)
    px.init(backend="ray", address=address, log_to_driver=False)
    with px.ResourcePool([2], use_gpu=False, name_prefix=f"driver-{os.getpid()}") as pool:
        group = px.WorkerGroup(pool, Producer)
        pids = [*group.pid(), *(pid for children in group.leave_children() for pid in children)]
        _kept = px.put(bytes(8 * 2**20))
        sync_weights(group)
        call = group.nap.submit(60.0) if ending == "call" else None
        if ending == "put":
            channel = px.Channel(1)
            call = group.put_two.submit(channel)
            while not channel.depth.puts:
                time.sleep(0.01)
        print(json.dumps(pids), flush=True)
        if call is not None:
            call.result()
        if ending == "exception":
            raise ValueError("the driver's own mistake")
        if ending == "exit":
            sys.exit(3)
        if ending == "return":
            return


class Driver:
    """A driver in a process of its own, attached to the cluster of the tests."""

    def __init__(self, ending: str) -> None:
        address = ray.get_runtime_context().gcs_address
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, address, ending],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAY_DEDUP_LOGS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        self.pids: list[int] = json.loads(line)

    def left(self) -> list[object]:
        """Return processes and placement groups that still exist."""
        return left_of_driver(self.pids, f"driver-{self.process.pid}-")


@pytest.fixture
def start() -> Iterator[Callable[[str], Driver]]:
    """Function that starts drivers, which are killed after the test."""
    started: list[Driver] = []

    def start(ending: str) -> Driver:
        started.append(Driver(ending))
        return started[-1]

    yield start
    for driver in started:
        driver.process.kill()
        driver.process.communicate()


@pytest.mark.parametrize(
    ("ending", "signum"),
    [
        ("call", signal.SIGKILL),
        ("call", signal.SIGINT),
        ("call", signal.SIGTERM),
        ("put", signal.SIGKILL),  # the ranks wait at a channel
    ],
)
def test_a_driver_that_a_signal_ends_during_a_call_leaves_nothing_after_5_s(
    ending: str, signum: signal.Signals, start: Callable[[str], Driver]
) -> None:
    free, shared = ray.available_resources()["object_store_memory"], set(os.listdir("/dev/shm"))
    driver = start(ending)
    assert all(map(is_there, driver.pids))
    time.sleep(0.3)  # it waits for its call then

    driver.process.send_signal(signum)

    assert within(5.0, lambda: not driver.left()), driver.left()
    assert within(5.0, lambda: ray.available_resources()["object_store_memory"] > free - 2**20)
    assert set(os.listdir("/dev/shm")) <= shared
    driver.process.wait(10.0)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("exception", 1),
        pytest.param("exit", 3, marks=pytest.mark.soak),
        pytest.param("return", 0, marks=pytest.mark.soak),
    ],
)
def test_a_driver_that_leaves_the_with_block_leaves_nothing(
    ending: str, code: int, start: Callable[[str], Driver]
) -> None:
    driver = start(ending)

    assert driver.process.wait(15.0) == code

    assert within(5.0, lambda: not driver.left()), driver.left()


def test_a_killed_run_of_a_script_disturbs_no_concurrent_or_later_run(start: Callable[[str], Driver]) -> None:
    first, second = start("call"), start("call")

    first.process.kill()

    assert within(5.0, lambda: not first.left()), first.left()
    assert all(map(is_there, second.pids))
    third = start("return")
    assert third.process.wait(15.0) == 0
    second.process.kill()
    assert within(5.0, lambda: not second.left())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
