"""``ray.shutdown()`` while groups are open: they are closed, and nothing of them touches Ray again."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.fault_workers import within

SCRIPT = Path(__file__).with_name("leaving_script.py")
MARK = "PHALANX_TEST_LEAVING"


def left_behind(mark: str) -> list[str]:
    """Command lines of the processes that a driver with this mark has started."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    return [line for line in found if line]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["px", pytest.param("ray", marks=pytest.mark.soak)])
def test_a_driver_leaves_its_cluster_with_groups_open_and_goes_on_with_others(start: str) -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), start],
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
    assert all("Connect again with px.init() or ray.init()" in line for line in closed)
    assert within(5.0, lambda: not left_behind(mark))
