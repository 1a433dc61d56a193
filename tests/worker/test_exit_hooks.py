"""What the library registered runs at the end of a rank: once, last first, whatever fails."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.worker.exit_hooks import Closers, current_closers


def fail(text: str) -> None:
    raise ValueError(text)


def test_closers_run_once_the_last_one_first_also_those_that_a_closer_adds() -> None:
    closers, ran = Closers(own_process=False), []
    closers.add(ran.append, 1)
    closers.add(ran.append, 2)
    closers.add(closers.add, ran.append, 3)
    assert closers.run() == []
    assert closers.run() == []
    assert ran == [3, 2, 1]


def test_one_that_fails_is_reported_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    closers, ran = Closers(own_process=False), []
    closers.add(ran.append, 1)
    closers.add(fail, "no disk")
    assert [str(error) for error in closers.run()] == ["no disk"]
    assert closers.run() == []
    assert ran == [1]
    assert "closer fail raised ValueError" in capsys.readouterr().err


def test_one_that_fails_with_nowhere_to_report_it_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closers, ran = Closers(own_process=False), []
    closers.add(ran.append, 1)
    closers.add(fail, "no disk")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)

    assert [str(error) for error in closers.run()] == ["no disk"]
    assert ran == [1]


def test_an_orderly_exit_runs_them(tmp_path: Path) -> None:
    made = tmp_path / "made"
    code = (
        "import os, sys\nfrom phalanx.worker.exit_hooks import Closers\n"
        f"Closers(own_process=True).add(os.unlink, {str(made)!r})\nopen({str(made)!r}, 'w').close()\nsys.exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 3
    assert not made.exists()


class Leaves(px.Worker):
    @px.register
    def leave(self, folder: str, raises: bool = False) -> str:
        path = os.path.join(folder, f"segment-{self.rank}")
        closers = current_closers()
        assert closers is not None
        closers.add(os.unlink, path)
        Path(path).write_text("")
        self.raises = raises
        return path

    def close(self) -> None:
        if getattr(self, "raises", False):
            raise ValueError("cannot close")


@pytest.mark.parametrize("raises", [False, True])
def test_closers_run_after_the_users_close_also_where_that_raised(
    pool: px.ResourcePool, tmp_path: Path, raises: bool
) -> None:
    with px.WorkerGroup(pool, Leaves) as group:
        left = group.leave(str(tmp_path), raises)
        assert all(map(os.path.exists, left))
    assert not any(map(os.path.exists, left))


def test_the_end_of_one_group_leaves_what_another_has_made(pool: px.ResourcePool, tmp_path: Path) -> None:
    with px.WorkerGroup(pool[0:1], Leaves) as group:
        (tmp_path / "other").mkdir()
        with px.WorkerGroup(pool[1:2], Leaves) as other:
            left: Any = other.leave(str(tmp_path / "other"))
            mine = group.leave(str(tmp_path))
        assert not os.path.exists(left[0])
        assert os.path.exists(mine[0])
