"""verl's own ``DataProto`` through every dispatch mode: as values and futures, with padding, of uneven sizes."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.verl.conftest import Interpreter

SCRIPT = Path(__file__).with_name("batches_on_ray.py")
CASES = re.findall(r"^def (case_\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def errors(python: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error of each case, empty if it passed."""
    interpreter = Interpreter(python, data, tmp_path_factory.mktemp("batches"))
    with tempfile.TemporaryDirectory(prefix="px") as folder:
        report = Path(folder, "report.json")
        ran = interpreter.run("-m", "phalanx", "verl", str(SCRIPT), str(report), RAY_TMPDIR=folder)
        assert ran.returncode == 0, ran.stderr[-4000:]
        reported: dict[str, str] = json.loads(report.read_text())
    return reported


@pytest.mark.parametrize("case", CASES)
def test_a_case_of_batches_has_no_error(errors: dict[str, str], case: str) -> None:
    assert errors[case] == "", errors[case]
