"""``ray.shutdown()`` with open groups: they are closed, and never use Ray again."""

from __future__ import annotations

import faulthandler
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import phalanx as px
from tests.support.fault_workers import within

MARK = "PHALANX_TEST_LEAVING"


class Adder(px.Worker):
    @px.register
    def add(self, x: int) -> int:
        print("adds", x, flush=True)
        return x + self.rank

    @px.register
    def count(self) -> Iterator[int]:
        yield from range(1000)

    @px.register
    def wait(self) -> None:
        threading.Event().wait()


_earlier: list[tuple[Any, Any]] = []
"""Open streams and stored values of earlier clusters."""


def play(start: str) -> object:
    """Leave a cluster with groups open; ``start`` is "px" or "ray", whose ``init`` is called."""
    if start == "ray":
        ray.init(address="local", num_cpus=4, include_dashboard=False)
    else:
        px.init(num_cpus=4)
    group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False, backend="ray"), Adder)
    assert group.add(1) == [1, 2]
    for items, stored in _earlier:
        for use, earlier in (next, items), (group.add, stored):  # Ray would abort the process
            try:
                use(earlier)
            except px.GroupClosed:
                print("refused", flush=True)
    items = group.count.stream(buffer=2)
    next(items)
    _earlier.append((items, px.put(1)))
    waiting = group.wait.submit()  # never ends, and a thread waits for it
    threading.Thread(target=waiting.exception, daemon=True).start()
    ray.shutdown()
    time.sleep(3)  # background threads have checked several times by then
    assert not ray.is_initialized()
    try:
        group.add(1)
    except px.GroupClosed as error:
        print("closed:", str(error).partition("\n")[0], flush=True)
    assert not ray.is_initialized()
    return group, waiting


def left_behind(mark: str) -> list[str]:
    """Return the command lines of the processes that a driver with this mark started."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # the process has ended, or is another user's
            continue
    return [line for line in found if line]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["px", pytest.param("ray", marks=pytest.mark.soak)])
def test_a_driver_can_leave_its_cluster_with_open_groups_and_start_others(start: str) -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-m", __name__, start],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, MARK: mark},
    ) as driver:
        assert driver.stdout is not None
        lines = list(itertools.takewhile(lambda line: line != "the end\n", driver.stdout))
        code = driver.wait(10.0)

    closed = [line for line in lines if line.startswith("closed:")]
    assert (code, len(closed)) == (0, 2), "".join(lines)
    assert lines.count("refused\n") == 2
    assert all("Connect again with px.init() or ray.init()" in line for line in closed)
    assert within(5.0, lambda: not left_behind(mark))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)
    kept = [play(*sys.argv[1:]) for _ in range(2)]  # the first groups still exist when others are started
    print("the end", flush=True)
