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


class Marked:
    """A process with the mark of a rank, which printed some words."""

    def __init__(self, script: str) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        command, env = [sys.executable, "-S", "-c", script], {**os.environ, "PHALANX_PROCESS": self.mark}
        pipe, silent = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=pipe, stderr=silent, text=True, env=env)
        assert self.process.stdout is not None
        self.printed = self.process.stdout.readline().split()
        found = look_at(self.process.pid)
        assert found is not None
        self.started = found.started
        self.target = ProcessHandle(self.process.pid, SideChannel(self.started, -1, -1, -1, self.mark))

    def alive(self) -> list[int]:
        pids = [self.process.pid, *(int(word) for word in self.printed if word.isdigit())]
        return [pid for pid in pids if look_at(pid) is not None]


@pytest.fixture
def tree(request: pytest.FixtureRequest) -> Iterator[Marked]:
    """A process with a child in a session of its own and an orphaned daemon, or of another script."""
    made = Marked(getattr(request, "param", TREE))
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


@pytest.mark.parametrize("tree", [SHARING], indirect=True, ids=["sharing"])
def test_the_reaper_leaves_no_shared_memory_names_of_killed_processes(tree: Marked) -> None:
    """Python's resource tracker removes the names if the reaper gives it time."""
    assert len(tree.printed) == 2
    assert all(os.path.exists(f"/dev/shm/{name}") for name in tree.printed)
    reaper = Reaper()
    reaper.answer({"watch": [(tree.process.pid, tree.started, tree.mark)]})

    assert reaper.end([tree.process.pid]) == []
    assert [name for name in tree.printed if os.path.exists(f"/dev/shm/{name}")] == []


def test_the_reaper_removes_the_folders_of_a_rank_with_their_links_and_no_others(
    tree: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for mark in (tree.mark, "77-another"):
        folder = tmp_path / f"phalanx-{mark}-x7_a"
        (folder / "within").mkdir(parents=True)
        (tmp_path / mark).touch()
        (folder / "link").symlink_to(tmp_path / mark)

    reaper = Reaper()
    reaper.answer({"watch": [(tree.process.pid, tree.started, tree.mark)]})
    reaper.end([tree.process.pid])

    assert {path.name for path in tmp_path.iterdir()} == {"77-another", "phalanx-77-another-x7_a"}


def test_ending_a_rank_spares_a_later_process_with_its_pid(tree: Marked) -> None:
    reaper, agent = Reaper(), NodeAgent()
    reaper.answer({"watch": [(tree.process.pid, tree.started - 1, "of-another")]})
    agent.watch([tree.target])
    earlier = SideChannel(tree.started - 1, -1, -1, -1, "of-an-earlier-rank")

    reaper.end([tree.process.pid])
    assert agent.end([tree.target._replace(side=earlier)]) == [[]]

    assert len(tree.alive()) == 3
    assert agent.end([tree.target]) == [[]]
    assert tree.alive() == []


def test_a_killed_reaper_is_replaced_and_still_ends_its_processes(tree: Marked) -> None:
    agent = NodeAgent()
    agent.watch([tree.target])
    for name in filter(str.isdigit, os.listdir("/proc")):
        command = read_proc(int(name), "cmdline").replace(b"\0", b" ").decode()
        if "reaper.py" in command and f" {os.getpid()} " in command:
            os.kill(int(name), 9)

    assert agent.end([tree.target]) == [[]]
    assert tree.alive() == []
