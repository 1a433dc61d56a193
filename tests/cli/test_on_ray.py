"""Each command against a cluster with a group on it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner, Result

import phalanx as px
from phalanx.cli.main import app
from phalanx.session.session import session
from tests.support.fault_workers import within


class Held(px.Worker):
    """Busy until a file exists."""

    @px.register
    def hold(self, folder: Path) -> None:
        print(f"held on rank {self.rank}")
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)

    @px.register
    def say(self, text: str) -> None:
        print(text)


@pytest.fixture(scope="module")
def address(ray_cluster: None) -> str:
    return ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def group(address: str) -> Iterator[Any]:
    with (
        px.ResourcePool([2], use_gpu=False, backend="ray") as pool,
        px.WorkerGroup(pool, px.colocate({"one": Held, "two": Held}), name="seen", show_ranks="none") as made,
    ):
        assert session.publisher.flush(10.0)
        yield made


@contextlib.contextmanager
def busy(group: Any, folder: Path) -> Iterator[None]:
    """Keep rank 1 busy with a call."""
    future = group.one[1].hold.submit(folder)
    try:
        assert within(20, (folder / "begun").exists)
        yield
    finally:
        (folder / "go").touch()
        future.result(timeout=20)


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command, and kill it at the end of the block."""
    with subprocess.Popen(command, **options) as child:
        try:
            yield child
        finally:
            child.kill()


def run(address: str, *args: str) -> Result:
    return CliRunner().invoke(app, [*args, "--address", address])


def test_top_shows_the_calls_of_each_rank_as_json_and_in_a_table(
    address: str, group: Any, tmp_path: Path
) -> None:
    with busy(group, tmp_path):
        ran = run(address, "top", "seen", "--once", "--json")
        table = run(address, "top", "see", "--once")
    (found,) = [g for r in json.loads(ran.output)["runs"] for g in r["groups"] if g["name"] == "seen"]

    assert (ran.exit_code, found["state"]) == (0, "ready")
    assert [[call["method"] for call in rank["doing"]] for rank in found["ranks"]] == [[], ["one.hold"]]
    assert (table.exit_code, "one+two" in table.output, "idle" in table.output) == (0, True, True)


def test_stack_shows_the_stack_of_a_rank_and_starts_no_ray_job(
    address: str, group: Any, tmp_path: Path
) -> None:
    before = len(ray._private.state.jobs())  # pyright: ignore[reportAttributeAccessIssue]
    with busy(group, tmp_path):
        ran = run(address, "stack", "seen", "--rank", "1")

    assert (ran.exit_code, "rank 1" in ran.output, "rank 0" in ran.output) == (0, True, False)
    assert "at one.hold for" in ran.output
    assert "test_on_ray.py" in ran.output
    assert len(ray._private.state.jobs()) == before  # pyright: ignore[reportAttributeAccessIssue]


def test_logs_shows_lines_of_ranks_with_their_prefix_and_follows_later_lines(
    address: str, group: Any
) -> None:
    group.one.say("for the log")
    host = group.core.endpoints[0].facts.slot.host
    ran = run(address, "logs", "seen", "--tail", "1")

    lines = [f"[one+two r{rank}@{host}] for the log" for rank in range(2)]
    assert (ran.exit_code, ran.output.splitlines()) == (0, lines)

    options = ["-f", "-n", "0", "-r", "0", "--address", address]
    command = [sys.executable, "-m", "phalanx", "logs", "seen", *options]
    without_check_mark = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    with running(command, stdout=subprocess.PIPE, text=True, env=without_check_mark) as follower:
        assert follower.stdout is not None
        # The command shows only lines printed after its start.
        while not select.select([follower.stdout], [], [], 0.1)[0]:
            group.one.say("after \u2713")
        line = follower.stdout.readline()
        follower.send_signal(signal.SIGINT)  # not earlier: its imports may swallow the signal
        follower.communicate()

    assert (follower.returncode, line[-10:]) == (0, "] after ?\n")


def test_top_is_live_on_a_terminal_until_q(address: str, group: Any) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "phalanx", "top", "seen", "--every", "0.1", "--address", address]
    with running(command, stdin=theirs, stdout=theirs, env={**os.environ, "TERM": "xterm"}) as live:
        os.close(theirs)
        shown = b""
        while b"ready" not in shown:
            shown += os.read(ours, 65536)
        os.write(ours, b"\x1b[Aq")  # an arrow key before
        with contextlib.suppress(OSError):  # the terminal closes with the command
            while os.read(ours, 65536):
                pass
        assert live.wait() == 0
    os.close(ours)


def test_doctor_inspects_the_cluster(address: str, group: Any) -> None:
    ran = run(address, "doctor", "--json")
    data = json.loads(ran.output)

    assert data["machine"]["cluster"]["address"] == address
    assert data["machine"]["cluster"]["cpus"] == ray.cluster_resources()["CPU"]
    assert set(data["machine"]["limits"]) == {"nofile", "nproc", "memlock", "core"}
    assert data["machine"]["versions"]["ray"] == ray.__version__
    assert ran.exit_code == (1 if data["findings"] else 0)


@pytest.mark.parametrize("command", ["top", "stack", "logs"])
def test_an_unknown_group_or_rank_is_an_error_of_one_line_with_the_known_names(
    address: str, group: Any, command: str
) -> None:
    ran = run(address, command, "nothing")

    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "'nothing'" in ran.stderr
    assert "/seen" in ran.stderr
    if command != "top":
        ran = run(address, command, "seen", "--rank", "9")
        assert (ran.exit_code, "ready, has no rank 9: it has 2 ranks now" in ran.stderr) == (2, True)


@pytest.mark.parametrize("command", [["top", "--once"], ["stack", "x"], ["logs", "x"], ["doctor"]])
def test_an_unreachable_cluster_is_an_error_of_one_line_with_advice(command: list[str]) -> None:
    ran = run("127.0.0.1:1", *command)

    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "does not answer" in ran.stderr and "--address" in ran.stderr
