"""The chapters of verl's published tutorial that use verl, run as scripts. The first chapter uses Ray alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "tutorial"
ALLOWED = {"device", "backend", "paths", "ray.init counts", "arguments"}
SCRIPTS = ("chapters_2_and_3.py", "chapter_4.py")
#: Lines of Ray and of ranks.
FROM_ELSEWHERE = re.compile(r".*pid=|.*\(raylet\)|\[\S+ r\d+@")

pytestmark = [pytest.mark.timeout(600)]


def run(script: str, folder: Path, **variables: str) -> str:
    """Run a script, which must succeed, and return its output."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONWARNINGS": "ignore", **variables}
    environment.pop("RAY_ADDRESS", None)
    environment["RAY_TMPDIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, str(FOLDER / script)], capture_output=True, text=True, env=environment, timeout=580
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path: paths of Ray's sockets have at most 107 characters."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix="px"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_adaptations_of_a_script_are_of_the_allowed_kinds(script: str) -> None:
    listed = re.findall(r"# adapted: (.+)", (FOLDER / script).read_text())
    kinds = {kind.strip() for line in listed for kind in re.sub(r"\(.*\)", "", line).split(",")}

    assert kinds
    assert kinds <= ALLOWED


@pytest.mark.slow
def test_chapters_2_and_3_print_the_published_output(short: Path) -> None:
    output = run("chapters_2_and_3.py", short)

    published = [
        "[tensor([1.]), tensor([2.]), tensor([3.]), tensor([4.])]",
        "[tensor([2.]), tensor([3.]), tensor([4.]), tensor([5.])]",
        ", ".join(f"tensor([{n}.])" for n in range(3, 11)).join("[]"),
        "4 4 8",
        ", ".join(f"tensor([{n}.])" for n in range(10, 18)).join("[]"),
        "8",
    ]
    assert [line for line in output.splitlines() if not FROM_ELSEWHERE.match(line)] == published


@pytest.mark.slow
@pytest.mark.parametrize("length", [64, pytest.param(2048, marks=pytest.mark.soak)])
def test_chapter_4_prints_its_parallel_sizes_and_the_shape_of_its_output(short: Path, length: int) -> None:
    output = run("chapter_4.py", short, TUTORIAL_LENGTH=str(length))

    lines = [line for line in output.splitlines() if not FROM_ELSEWHERE.match(line)]
    assert lines[-3:] == ["4 4 1 1", "[None, None, None, None]", f"torch.Size([{length}, 16, 4096])"]
