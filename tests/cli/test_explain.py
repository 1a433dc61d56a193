"""`phalanx explain FILE.py:object`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.main import FAILED, app

runner = CliRunner()
FILE = """
import phalanx as px

class Actor(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update(self, batch):
        return batch

class Names:
    mesh = px.Mesh(dp=2, tp=2)

roles = px.colocate({"actor": Actor, "critic": Actor})

def start():
    return px.ResourcePool([2], use_gpu=False, backend="inline")

if __name__ == "__main__":
    raise SystemExit("ran as a script")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    import sys

    path = tmp_path / "explained_file.py"
    path.write_text(FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop("explained_file", None)


def test_a_class_of_a_file_is_explained_without_its_main_part(file: Path) -> None:
    ran = runner.invoke(app, ["explain", f"{file}:Actor"])

    assert ran.exit_code == 0
    assert "update(batch)" in ran.output
    assert "rows, split over the ranks" in ran.output


def test_as_json(file: Path) -> None:
    ran = runner.invoke(app, ["explain", f"{file}:roles", "--json"])

    rows = json.loads(ran.stdout)["rows"]
    assert [row["method"] for row in rows] == ["actor.update(batch)", "critic.update(batch)"]


def test_dots_lead_further_in(file: Path) -> None:
    ran = runner.invoke(app, ["explain", f"{file}:Names.mesh", "--json"])

    assert json.loads(ran.stdout)["rows"][2] == {"rank": 2, "dp": 1, "tp": 0}


def test_a_pool_that_the_file_starts_is_explained_and_closed(file: Path) -> None:
    file.write_text(f"{FILE}\npool = start()\n")

    ran = runner.invoke(app, ["explain", f"{file}:pool", "--json"])

    import sys

    assert [row["local rank"] for row in json.loads(ran.stdout)["rows"]] == [0, 1]
    assert sys.modules["explained_file"].pool.closed


@pytest.mark.parametrize(
    ("name", "message"),
    [(":Actr", "there is no 'Actr'; it has: Actor"), (":FILE", "no 'FILE'"), ("", "expected FILE.py:OBJECT")],
)
def test_names_that_are_not_there(file: Path, name: str, message: str) -> None:
    ran = runner.invoke(app, ["explain", f"{file}{name}"])

    assert ran.exit_code == FAILED
    assert message in ran.stderr


def test_a_file_that_raises(file: Path) -> None:
    file.write_text("1 / 0")

    ran = runner.invoke(app, ["explain", f"{file}:x"])

    assert (ran.exit_code, "ZeroDivisionError" in ran.stderr) == (FAILED, True)


def test_what_cannot_be_explained(file: Path) -> None:
    ran = runner.invoke(app, ["explain", f"{file}:start"])

    assert (ran.exit_code, "expected a pool, a group" in ran.stderr) == (FAILED, True)
