"""Exit hooks run at the end of a rank: once, the last hook first, whatever fails."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.worker.exit_hooks import ExitHooks, current_closers


def fail(text: str) -> None:
    raise ValueError(text)


def test_exit_hooks_run_once_in_reverse_order_also_if_a_hook_fails_or_adds_a_hook(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closers, ran = ExitHooks(own_process=False), []
    closers.add(ran.append, 1)
    closers.add(fail, "no disk")
    closers.add(ran.append, 2)
    closers.add(closers.add, ran.append, 3)
    assert [str(error) for error in closers.run()] == ["no disk"]
    assert closers.run() == []
    assert ran == [3, 2, 1]
    assert "closer fail raised ValueError" in capsys.readouterr().err

    nowhere = io.StringIO()
    nowhere.close()
    monkeypatch.setattr(sys, "stderr", nowhere)
    closers.add(ran.append, 4)
    closers.add(fail, "no disk")
    assert [str(error) for error in closers.run()] == ["no disk"]
    assert ran == [3, 2, 1, 4]


def test_sys_exit_runs_exit_hooks(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.touch()
    code = (
        "import os, sys\nfrom phalanx.worker.exit_hooks import ExitHooks\n"
        f"ExitHooks(own_process=True).add(os.unlink, {str(made)!r})\nsys.exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 3
    assert not made.exists()


class Leaves(px.Worker):
    @px.register
    def leave(self, folder: Path, name: str, raises: bool = False) -> Path:
        path = folder / f"{name}-{self.rank}"
        closers = current_closers()
        assert closers is not None
        closers.add(os.unlink, path)
        path.write_text("")
        self.raises = raises
        return path

    def close(self) -> None:
        if getattr(self, "raises", False):
            raise ValueError("cannot close")


def test_a_closed_group_runs_only_its_own_exit_hooks_also_if_a_workers_close_raised(
    pool: px.ResourcePool, tmp_path: Path
) -> None:
    with px.WorkerGroup(pool[0:1], Leaves) as group:
        with px.WorkerGroup(pool[1:3], Leaves) as other, px.WorkerGroup(pool[3:4], Leaves) as failing:
            left: list[Any] = other.leave(tmp_path, "other")
            left += failing.leave(tmp_path, "failing", raises=True)
            mine: list[Any] = group.leave(tmp_path, "mine")
            assert all(map(os.path.exists, left))
        assert not any(map(os.path.exists, left))
        assert os.path.exists(mine[0])
    assert not os.path.exists(mine[0])
