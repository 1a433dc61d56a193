"""Observing ranks from outside: on this machine, and on other nodes through an agent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

import phalanx as px
from phalanx.backends.ray.node_agents import RankObserver
from phalanx.display.registry_records import RankRecord


@pytest.fixture(scope="module")
def ranks(ray_cluster: None) -> Iterator[tuple[RankRecord, ...]]:
    with (
        px.ResourcePool([2], use_gpu=False, backend="ray") as pool,
        px.WorkerGroup(pool, px.Worker, name="looked-at", show_ranks="none") as group,
    ):
        yield group.core.record().ranks


@pytest.fixture(params=["here", "elsewhere"], scope="module")
def observer(ranks: Any, request: pytest.FixtureRequest) -> Iterator[RankObserver]:
    made = RankObserver(ray.get_runtime_context().gcs_address)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "elsewhere":
            patch.setattr(made, "_host", "another-host")
        yield made
    made.close()


def test_an_observer_reads_logs_of_ranks_and_reports_missing_files_and_processes(
    observer: RankObserver, ranks: tuple[RankRecord, ...]
) -> None:
    node, head = (ranks[0].node_id, ranks[0].host), b"# phalanx log: rank 1 of 2, Worker, group 'looked-at'"
    assert ranks[0].side is not None
    another = RankRecord(0, *node, os.getpid(), side=ranks[0].side)

    assert observer.read(ranks[1], 0, 100).startswith(head)
    with pytest.raises(OSError, match="no such file"):
        observer.read(RankRecord(0, *node, 1, log="/nowhere/rank-0.log"), 0, 1)
    assert not observer.inspect([another])[0].reachable, "the process is another one by now"


def test_the_stack_command_reads_stacks_of_ranks_on_another_host(ranks: tuple[RankRecord, ...]) -> None:
    script = (
        "import socket, sys\n"
        "socket.gethostname = lambda: 'another-host'\n"
        "from phalanx.cli.main import app\n"
        "app(['stack', 'looked-at', '--address', sys.argv[1]])\n"
    )
    address = ray.get_runtime_context().gcs_address
    ran = subprocess.run([sys.executable, "-c", script, address], capture_output=True, text=True, timeout=60)

    assert ran.returncode == 0, ran.stderr
    assert re.search(r"\nranks 0-1 \(host .*\): idle\n  File .* in main_loop\n", ran.stdout), ran.stdout
