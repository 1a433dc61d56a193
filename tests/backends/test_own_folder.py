"""Folders of temporary files: gone with their process, also where it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from phalanx.backends.temp_folder import OwnFolder, new_folder, sweep

OWNER = """
import sys, time
import phalanx as px
class Nothing(px.Worker):
    pass
px.init(backend="inline")
group = px.WorkerGroup(px.ResourcePool([1], use_gpu=False), Nothing)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def owner() -> subprocess.Popen[str]:
    """A process with a group of its own, inline."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def end(process: subprocess.Popen[str], *, killed: bool) -> None:
    if killed:
        process.kill()
    process.communicate(timeout=30)


def test_the_next_process_removes_the_folder_of_one_that_was_killed_and_of_no_other(place: Path) -> None:
    living = owner()
    kept = set(place.iterdir())
    killed = owner()
    end(killed, killed=True)
    assert len(set(place.iterdir()) - kept) == 1

    mine = OwnFolder()

    assert set(place.iterdir()) == {*kept, Path(mine.path)}
    mine.close()
    end(living, killed=False)
    assert not set(place.iterdir())


def test_what_is_not_ours_or_may_be_new_stays(place: Path) -> None:
    other, new, old = place / "phalanx-results", place / "phalanx-inline-new", place / "phalanx-inline-old"
    for folder in (other, new, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    (place / "phalanx-inline-link").symlink_to(other)

    sweep(str(place))

    assert {path.name for path in place.iterdir()} == {
        "phalanx-results",
        "phalanx-inline-new",
        "phalanx-inline-link",
    }


def test_a_folder_that_was_taken_for_one_that_is_left_is_made_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, mkdtemp = list[str](), tempfile.mkdtemp

    def swept(prefix: str) -> str:
        made.append(mkdtemp(prefix=prefix))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept)
    folder = OwnFolder()

    assert folder.path == made[1]
    folder.close()


def test_all_folders_of_a_process_are_in_one_and_cost_one_open_file(place: Path) -> None:
    folders = [Path(new_folder()) for _ in range(3)]

    assert len({folder.parent for folder in folders}) == 1 and len(set(folders)) == 3


def test_a_forked_process_removes_nothing(place: Path) -> None:
    folder = OwnFolder()
    child = os.fork()
    if not child:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)

    assert os.path.isdir(folder.path)
    folder.close()
