"""The quick start as a newcomer follows it: files are saved and commands run in order, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks, same_output

PAGE = DOCS / "quick-start.md"
INSTALL = "install"  # title of the block that makes the environment, which exists in a test


def shell(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    command = ["bash", "-euc", block.text]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{block.where}: {ended.stdout}{ended.stderr}"
    # Lines of Ray come at any time, such as those of workers that end with their driver.
    return "".join(line for line in ended.stdout.splitlines(keepends=True) if "(raylet)" not in line)


def newcomer() -> dict[str, str]:
    """Return an environment with this `python`, and without settings of the library."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PHALANX_", "RAY_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "RAY_AUTH_MODE": "disabled"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_start_works_by_copy_and_paste(tmp_path: Path) -> None:
    ran, printed = 0, ""
    for block in blocks(PAGE):
        if block.language == "python":
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "sh" and block.title != INSTALL:
            printed = shell(block, tmp_path, newcomer())
            ran += 1
        elif block.language == "text":
            assert same_output(block.text, printed), (
                f"{block.where} shows\n{block.text}\nprinted was\n{printed}"
            )
    assert ran == 4
