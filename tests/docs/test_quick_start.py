"""The quick start as a newcomer does it: files saved and commands run one after another, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks, same_output

PAGE = DOCS / "quick-start.md"
INSTALL = "install"  # the title of the block that makes the environment, which a test has already


def follow(folder: Path, environment: Mapping[str, str]) -> int:
    """Do what the page says; how many commands were run."""
    ran, printed = 0, ""
    for block in blocks(PAGE):
        if block.language == "python":
            (folder / block.title).write_text(block.text)
        elif block.language == "sh" and block.title != INSTALL:
            printed = shell(block, folder, environment)
            ran += 1
        elif block.language == "text":
            assert same_output(block.text, printed), (
                f"{block.where} shows\n{block.text}\nprinted was\n{printed}"
            )
    return ran


def shell(block: Block, folder: Path, environment: Mapping[str, str]) -> str:
    command = ["bash", "-euc", block.text]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{block.where}: {ended.stdout}{ended.stderr}"
    # Ray's own lines come when they come: of workers that end with their driver, say.
    return "".join(line for line in ended.stdout.splitlines(keepends=True) if "(raylet)" not in line)


def newcomer() -> dict[str, str]:
    """An environment in which `python` is this one, and nothing else is set for the library."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PHALANX_", "RAY_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "RAY_AUTH_MODE": "disabled"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_start_works_by_copy_and_paste(tmp_path: Path) -> None:
    assert follow(tmp_path, newcomer()) == 4
