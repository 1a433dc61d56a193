"""Groups of a trainer under the overlay: one error for each way in which a rank fails, deadlines, a trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.verl.conftest import Interpreter

SCRIPT = str(Path(__file__).with_name("failures_on_ray.py"))


def reports(interpreter: Interpreter, *failures: str, **env: str) -> tuple[list[dict[str, Any]], str]:
    """The reports of a trainer for each failure, and all that was printed."""
    with tempfile.TemporaryDirectory(prefix="px") as folder:
        ran = interpreter.run("-m", "phalanx", "verl", SCRIPT, *failures, RAY_TMPDIR=folder, **env)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(failures), ran.stderr[-4000:]
    return [json.loads(line) for line in lines], ran.stdout


def test_a_rank_that_raises_ends_the_call_while_others_hang(interpreter: Interpreter, tmp_path: Path) -> None:
    trace = tmp_path / "run.html"

    (seen,), output = reports(interpreter, "raise", PHALANX_TRACE=str(trace), STAY="8")

    assert {"ValueError", "RemoteCallError"} < set(seen["first"]["kinds"])
    assert "bad batch" in seen["first"]["text"]
    assert "failures_on_ray.py" in seen["first"]["text"]  # its traceback
    assert seen["first"]["seconds"] < 30
    assert "GroupBroken" in seen["second"]["kinds"]
    assert seen["ranks"] == [0, 1]  # a function sent to a worker's handle sees the worker
    assert "[Model r0-1@" in output  # both ranks are at work: one line
    assert "work" in trace.read_text()


@pytest.fixture(scope="module")
def silent(python: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Reports of trainers with a rank that dies, and with one that is stopped."""
    interpreter = Interpreter(python, data, tmp_path_factory.mktemp("silent"))
    return reports(interpreter, "lazy kill", "stop", PHALANX_CALL_TIMEOUT="8")[0]


def test_a_rank_that_dies_is_the_error_of_a_future(silent: list[dict[str, Any]]) -> None:
    first = silent[0]["first"]

    assert "WorkerDiedError" in first["kinds"]
    assert "rank 1" in first["text"]


def test_a_rank_that_is_stopped_is_reported_at_the_deadline(silent: list[dict[str, Any]]) -> None:
    first = silent[1]["first"]

    assert "CallTimeout" in first["kinds"]
    assert "rank 1" in first["text"]
