"""The reaper, which ends processes that ranks leave behind, on ordinary processes without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.backends.ray.node_agents import NodeAgent
from phalanx.backends.ray.rank_processes import ProcessHandle
from phalanx.backends.ray.reaper import Reaper, look_at, read_proc
from phalanx.wire.messages import SideChannel
from tests.support.fault_workers import DAEMON

TREE = f"""
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "961"], start_new_session=True)
daemon = subprocess.Popen([sys.executable, "-S", "-c", {DAEMON!r}], stdout=subprocess.PIPE, text=True)
print(child.pid, daemon.stdout.readline().strip(), flush=True)
time.sleep(963)
"""


class Tree:
    """A process with a child in a session of its own and an orphaned daemon."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", TREE],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PHALANX_PROCESS": mark},
        )
        assert self.process.stdout is not None
        self.descendants = [int(pid) for pid in self.process.stdout.readline().split()]
        found = look_at(self.process.pid)
        assert found is not None
        self.started = found.started
        self.target = ProcessHandle(self.process.pid, SideChannel(self.started, -1, -1, -1, mark))

    def alive(self) -> list[int]:
        return [pid for pid in (self.process.pid, *self.descendants) if look_at(pid) is not None]


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = Tree(f"{os.getpid()}-{time.monotonic_ns()}")
    yield made
    for pid in made.alive():
        os.kill(pid, 9)
    made.process.wait(5.0)
    assert made.process.stdout is not None
    made.process.stdout.close()


SHARING = """
import time
from multiprocessing import get_context, resource_tracker, shared_memory
if __name__ == "__main__":
    lock, segment = get_context("spawn").Lock(), shared_memory.SharedMemory(create=True, size=1)
    print("sem." + lock._semlock.name.strip("/"), segment.name.strip("/"), flush=True)
    time.sleep(964)
"""


def test_the_reaper_leaves_no_shared_memory_names_of_killed_processes() -> None:
    """Python's resource tracker removes the names if the reaper gives it time."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-S", "-c", SHARING]
    pipe, env = subprocess.PIPE, {**os.environ, "PHALANX_PROCESS": mark}
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        names = process.stdout.readline().split()
        found = look_at(process.pid)
        assert found is not None
        assert all(os.path.exists(f"/dev/shm/{name}") for name in names)
        reaper = Reaper()
        reaper.answer({"watch": [(process.pid, found.started, mark)]})

        assert reaper.end([process.pid]) == []

        assert [name for name in names if os.path.exists(f"/dev/shm/{name}")] == []


def test_the_reaper_removes_the_folders_of_a_rank_and_no_others(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for mark in (tree.mark, "77-another"):
        (tmp_path / f"phalanx-{mark}-x7_a" / "within").mkdir(parents=True)

    reaper = Reaper()
    reaper.answer({"watch": [(tree.process.pid, tree.started, tree.mark)]})
    reaper.end([tree.process.pid])

    assert [path.name for path in tmp_path.iterdir()] == ["phalanx-77-another-x7_a"]


def test_ending_a_rank_spares_a_later_process_with_its_pid(tree: Tree) -> None:
    reaper, agent = Reaper(), NodeAgent()
    reaper.answer({"watch": [(tree.process.pid, tree.started - 1, "of-another")]})
    agent.watch([tree.target])
    earlier = SideChannel(tree.started - 1, -1, -1, -1, "of-an-earlier-rank")

    reaper.end([tree.process.pid])
    assert agent.end([tree.target._replace(side=earlier)]) == [[]]

    assert len(tree.alive()) == 3
    assert agent.end([tree.target]) == [[]]
    assert tree.alive() == []


def test_a_killed_reaper_is_replaced_and_still_ends_its_processes(tree: Tree) -> None:
    agent = NodeAgent()
    agent.watch([tree.target])
    for name in filter(str.isdigit, os.listdir("/proc")):
        command = read_proc(int(name), "cmdline").replace(b"\0", b" ").decode()
        if "reaper.py" in command and f" {os.getpid()} " in command:
            os.kill(int(name), 9)

    assert agent.end([tree.target]) == [[]]

    assert tree.alive() == []
