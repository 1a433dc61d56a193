"""`phalanx trace FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.tracing.files import write
from tests.tracing.made_up import TRACE

runner = CliRunner()


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
        (["nowhere.json"], "nowhere.json: No such file"),
        (["report.html"], "expected a trace that px.trace wrote as .json"),
        (["{file}", "--html", "report.txt"], "expected a path that ends in .html"),
    ],
)
def test_invalid_arguments_are_an_error_of_one_line_with_exit_code_2(
    file: Path, arguments: list[str], says: str
) -> None:
    ended = runner.invoke(app, ["trace", *(one.format(file=file) for one in arguments)])

    assert ended.exit_code == 2
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert [path.name for path in file.parent.iterdir()] == ["run.json"]
