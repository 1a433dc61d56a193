"""The trace that the environment asks for is written whole, or the one before stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.debug import trace


def saved(monkeypatch: pytest.MonkeyPatch, path: Path, *, fails: bool = False) -> list[str]:
    """The files beside the trace once it was saved."""

    def save(to: Path) -> Path:
        to.write_text("half" if fails else "new")
        if fails:
            raise OSError("the disk is full")
        return to

    monkeypatch.setattr(trace._whole_run, "tracer", SimpleNamespace(_path=path, save=save))
    trace.save_environment_trace()
    return [file.name for file in path.parent.iterdir() if file.suffix == ".html" and file.name[0] != "."]


def test_a_trace_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text("old")

    assert saved(monkeypatch, path) == ["run.html"]
    assert path.read_text() == "new"


def test_a_trace_that_cannot_be_written_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    path.write_text("old")

    saved(monkeypatch, path, fails=True)

    assert path.read_text() == "old"
