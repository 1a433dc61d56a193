"""Scripts that tests run in processes of their own, and the reports of scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
BEGIN = "FOUND "


def tell(found: object) -> None:
    """Report a value from a script to its test."""
    print(BEGIN + json.dumps(found), flush=True)


def told_by(module: str, *words: str, timeout: float) -> list[Any]:
    """Run a script, and return a list with the one value that it reported."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=_ROOT,
        env=environment,
        check=False,
    )
    told = [line.removeprefix(BEGIN) for line in done.stdout.splitlines() if line.startswith(BEGIN)]
    assert len(told) == 1, done.stderr[-4000:]
    return [json.loads(line) for line in told]


def start(script: Path, *arguments: str, backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, in the working directory ``folder``."""
    environment = {**os.environ, "PHALANX_BACKEND": backend, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def run(script: Path, *arguments: str, backend: str, folder: Path) -> str:
    """Run a script and return its output. Fail with all of its output if the script failed."""
    ended = start(script, *arguments, backend=backend, folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
