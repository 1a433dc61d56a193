"""Groups of a trainer under the overlay: one error for each way in which a rank fails, deadlines, a trace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.compat.overlay.stand_in import make_verl
from tests.compat.overlay.test_reach import python

SCRIPT = str(Path(__file__).with_name("script_on_ray.py"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_verl(tmp_path_factory.mktemp("verl"), whole=True)


def told(verl: Path, *failures: str, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """What a trainer of each failure saw, and all that was printed."""
    with tempfile.TemporaryDirectory(prefix="px") as folder:
        words = ["-m", "phalanx", "verl", SCRIPT, *failures]
        done = python(*words, path=[verl], seconds=300, RAY_TMPDIR=folder, **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(failures), done.stderr[-4000:]
    return [json.loads(line) for line in lines], done.stdout


def test_a_rank_that_raises_ends_the_call_while_others_hang(verl: Path, tmp_path: Path) -> None:
    trace = tmp_path / "run.html"

    (seen,), output = told(verl, "raise", PHALANX_TRACE=str(trace), STAY="8")

    assert {"ValueError", "RemoteCallError"} < set(seen["first"]["kinds"])
    assert "bad batch" in seen["first"]["text"]
    assert "script_on_ray.py" in seen["first"]["text"]  # its traceback
    assert seen["first"]["seconds"] < 30
    assert "GroupBroken" in seen["second"]["kinds"]
    assert seen["ranks"] == [0, 1]  # a function sent to a worker's handle sees the worker
    assert "[Model r0-1@" in output  # both ranks are at work: one line
    assert "work" in trace.read_text()


@pytest.fixture(scope="module")
def silent(verl: Path) -> list[dict[str, Any]]:
    """What trainers saw of which a rank dies, and stands still."""
    return told(verl, "lazy kill", "stop", PHALANX_CALL_TIMEOUT="8")[0]


def test_a_rank_that_dies_is_the_error_of_a_future(silent: list[dict[str, Any]]) -> None:
    first = silent[0]["first"]

    assert "WorkerDiedError" in first["kinds"]
    assert "rank 1" in first["text"]


def test_a_rank_that_stands_still_is_told_at_the_deadline(silent: list[dict[str, Any]]) -> None:
    first = silent[1]["first"]

    assert "CallTimeout" in first["kinds"]
    assert "rank 1" in first["text"]
