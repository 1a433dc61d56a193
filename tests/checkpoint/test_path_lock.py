"""One driver writes to a path: a second driver is refused by name, and a killed driver leaves no lock."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import phalanx as px
from phalanx.checkpoint.steps import CLAIM, PathLock, StepWriter, find_steps
from phalanx.checkpoint.storage import Storage

HOLD = """
import sys
from phalanx.checkpoint.steps import StepWriter
writer = StepWriter(sys.argv[1], 1)
writer.write("state", b"half")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "run")


def test_a_second_driver_is_refused_with_the_holders_pid_until_the_holder_is_killed(storage: Storage) -> None:
    command = [sys.executable, "-c", HOLD, storage.root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "held\n"
        name = f"held by pid {driver.pid} on host {socket.gethostname()} since"

        with pytest.raises(px.checkpoint.CheckpointLocked, match=name):
            StepWriter(storage.root, 1)

        driver.kill()
    StepWriter(storage.root, 2).commit()
    assert [(found.number, found.whole) for found in find_steps(storage)] == [(2, True)]


def test_the_last_user_releases_the_lock_although_a_forked_process_has_its_file(storage: Storage) -> None:
    first, second = PathLock.acquire(storage), PathLock.acquire(storage)
    copy = os.dup(second._file)  # type: ignore[attr-defined]

    command = [sys.executable, "-c", HOLD, storage.root]
    first.release()
    refused = subprocess.run(command, capture_output=True, text=True, input="")
    assert f"CheckpointLocked: {storage.root} is held by pid {os.getpid()} on host" in refused.stderr
    second.release()
    assert subprocess.run(command, capture_output=True, text=True, input="").stdout == "held\n"
    os.close(copy)


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}/run"


@pytest.mark.parametrize("at", ["before the commit", "with the manifest"])
def test_a_driver_that_lost_its_claim_of_a_store_commits_nothing(
    url: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, write = StepWriter(url, 1), Storage.write

    def claimed(self: Storage, name: str, data: bytes) -> None:
        write(self, name, data)
        write(Storage(url), CLAIM, b"pid 7 on host elsewhere")

    if at == "before the commit":
        claimed(Storage(url), "step", b"")
    else:
        monkeypatch.setattr(Storage, "write", claimed)

    with pytest.raises(px.checkpoint.CheckpointLocked, match="claimed by pid 7 on host elsewhere"):
        writer.commit()

    writer.abandon()
    assert find_steps(Storage(url)) == []


def test_a_driver_that_lost_its_claim_of_a_store_leaves_the_other_drivers_step_alone(url: str) -> None:
    lock = PathLock.acquire(Storage(url))
    Storage(url).write(CLAIM, b"pid 7 on host elsewhere")
    Storage(f"{url}/step-00000001").write("policy", b"half")

    with pytest.raises(px.checkpoint.CheckpointLocked, match="claimed by pid 7 on host elsewhere"):
        StepWriter(url, 2)

    assert Storage(f"{url}/step-00000001").read("policy") == b"half"
    lock.release()


def test_a_claim_that_another_driver_has_released_is_lost_for_this_step_only(url: str) -> None:
    lock = PathLock.acquire(Storage(url))
    writer = StepWriter(url, 1)
    Storage(url).remove(CLAIM)

    with pytest.raises(px.checkpoint.CheckpointLocked, match="claimed by a process that has released it"):
        writer.commit()

    writer.abandon()
    assert StepWriter(url, 2).commit().number == 2
    lock.release()


def test_a_claim_that_cannot_be_released_leaves_the_step_complete(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, unreachable = StepWriter(url, 1), px.checkpoint.CheckpointError("no route to host")
    monkeypatch.setattr(Storage, "remove", Mock(side_effect=unreachable))

    with pytest.warns(UserWarning, match="not released: no route to host"):
        assert writer.commit().number == 1


def test_a_path_and_a_link_to_it_have_the_same_lock(storage: Storage, tmp_path: Path) -> None:
    lock = PathLock.acquire(storage)
    (tmp_path / "link").symlink_to(storage.root)

    StepWriter(str(tmp_path / "link"), 1).commit()

    assert [found.number for found in find_steps(storage)] == [1]
    lock.release()
