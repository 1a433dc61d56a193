"""The four chapters of verl's published tutorial, run as scripts."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.scripts import run

FOLDER = Path(__file__).parent / "tutorial"
#: Lines of Ray and of ranks.
FROM_ELSEWHERE = re.compile(r".*pid=|.*\(raylet\)|\[\S+ r\d+@")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a short path: paths of Ray's sockets have at most 107 characters."""
    made = tempfile.mkdtemp(prefix="px")
    monkeypatch.setenv("RAY_TMPDIR", made)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return Path(made)


def printed(script: str, folder: Path) -> list[str]:
    """Return the lines that a script itself prints."""
    lines = run(FOLDER / script, backend="ray", folder=folder).splitlines()
    return [line for line in lines if not FROM_ELSEWHERE.match(line)]


def test_chapter_1_prints_image_rows_with_embeddings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = str(tmp_path / "files")
    subprocess.run([sys.executable, str(FOLDER / "local_files.py"), files], check=True, timeout=300)
    monkeypatch.setenv("TUTORIAL_FILES", files)

    output = run(FOLDER / "chapter_1.py", backend="ray", folder=folder)

    assert output.startswith("0\n10000\n")
    assert re.search(r"\[\{'path': '.*doggos-dataset/train/.*', 'class': '.*', 'embedding': array\(", output)


def test_chapters_2_and_3_print_the_published_output(folder: Path) -> None:
    published = [
        "[tensor([1.]), tensor([2.]), tensor([3.]), tensor([4.])]",
        "[tensor([2.]), tensor([3.]), tensor([4.]), tensor([5.])]",
        ", ".join(f"tensor([{n}.])" for n in range(3, 11)).join("[]"),
        "4 4 8",
        ", ".join(f"tensor([{n}.])" for n in range(10, 18)).join("[]"),
        "8",
    ]
    assert printed("chapters_2_and_3.py", folder) == published


@pytest.mark.parametrize("length", [64, pytest.param(2048, marks=pytest.mark.soak)])
def test_chapter_4_prints_its_parallel_sizes_and_the_shape_of_its_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setenv("TUTORIAL_LENGTH", str(length))

    last = ["4 4 1 1", "[None, None, None, None]", f"torch.Size([{length}, 16, 4096])"]
    assert printed("chapter_4.py", folder)[-3:] == last
