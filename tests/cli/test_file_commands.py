"""`phalanx runs PATH` and `phalanx trace FILE`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.checkpoint.steps import Step
from phalanx.cli.main import app
from phalanx.tracing.files import write
from tests.checkpoint.save_workers import writing
from tests.tracing.made_up import TRACE

runner = CliRunner()


def save(path: Path, step: int) -> Step:
    with writing(path, step) as writer:
        writer.write("groups/policy/actor/rank-0", bytes(2048))
        writer.parts["groups/policy/actor"] = {"kind": "group", "text": "2 ranks, 2.0 KiB: model"}
        return writer.commit()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    return tmp_path / "run"


def rows(text: str) -> list[list[str]]:
    """Return the cells of each row that shows a step."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return [cells for cells in lines if cells[0].isdigit()]


def test_steps_are_listed_with_size_and_content_also_in_a_narrow_terminal(path: Path) -> None:
    ended = runner.invoke(app, ["runs", str(path)])
    narrow = runner.invoke(app, ["runs", str(path)], env={"COLUMNS": "60"})

    assert ended.exit_code == 0
    assert [(cells[0], cells[1], cells[3]) for cells in rows(ended.stdout)] == [
        ("1", "complete", "2.0 KiB"),
        ("2", "complete", "2.0 KiB"),
    ]
    assert "policy/actor: 2 ranks" in ended.stdout
    assert [len(cells) for cells in rows(narrow.stdout)] == [5, 5]
    assert "step 2, policy/actor: 2 ranks, 2.0 KiB: model" in narrow.stdout.splitlines()


def test_a_damaged_step_is_listed_with_its_file_and_another_format_with_its_number(path: Path) -> None:
    damaged = Path(save(path, 3).path("groups/policy/actor/rank-0"))
    kept = damaged.read_bytes()
    damaged.unlink()
    ended = runner.invoke(app, ["runs", str(path)])

    assert ended.exit_code == 1
    assert [cells[1] for cells in rows(ended.stdout)] == ["complete", "complete", "damaged"]
    assert "actor/rank-0" in ended.stdout

    damaged.write_bytes(kept[:-1] + b"x")
    assert runner.invoke(app, ["runs", str(path)]).exit_code == 0
    checked = json.loads(runner.invoke(app, ["runs", str(path), "--check", "--json"]).stdout)
    assert [step["faults"] for step in checked["steps"]] == [[], [], ["groups/policy/actor/rank-0"]]

    manifest = Path(save(path, 4).path("manifest.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"format": 2', b'"format": 3'))
    shown = " ".join(runner.invoke(app, ["runs", str(path)]).stdout.split())
    assert "has format 3" in shown and "changed since the save" not in shown


def test_a_step_that_is_being_written_is_listed_as_half_written(path: Path) -> None:
    with writing(path, 3) as writer:
        writer.write("policy/rank-0", bytes(100))
        ended = runner.invoke(app, ["runs", str(path)])

    assert [cells[1] for cells in rows(ended.stdout)] == ["complete", "complete", "half-written"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(TRACE, tmp_path / "run.json")


def test_a_trace_is_summarized_as_text_or_json_and_converted_to_a_page(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    text = runner.invoke(app, ["trace", str(file)])
    data = runner.invoke(app, ["trace", str(file), "--json"])
    other = runner.invoke(app, ["trace", str(file), "--html", str(page)])

    assert (text.exit_code, other.exit_code) == (0, 0)
    assert "policy.actor.generate" in text.stdout
    assert "ValueError: no" in text.stdout
    assert json.loads(data.stdout)["methods"][0]["call"] == "policy.actor.update"
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "{file}.nothing"], "nothing was saved at"),
        (["trace", "nowhere.json"], "nowhere.json: No such file"),
        (["trace", "report.html"], "expected a trace that px.trace wrote as .json"),
        (["trace", "{file}", "--html", "report.txt"], "expected a path that ends in .html"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line_with_exit_code_2(
    file: Path, arguments: list[str], says: str
) -> None:
    ended = runner.invoke(app, [one.format(file=file) for one in arguments])

    assert ended.exit_code == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert [path.name for path in file.parent.iterdir()] == ["run.json"]
