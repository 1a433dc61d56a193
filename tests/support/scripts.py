"""Scripts that tests run, each in a process of its own; and what those with a cluster of their own tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_BEGIN = "FOUND "


def tell(found: object) -> None:
    """Of the script: tell the test something."""
    print(_BEGIN + json.dumps(found), flush=True)


def told_by(module: str, *words: str, timeout: float) -> list[Any]:
    """Run a script, and give the one thing that it told."""
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
    told = [line.removeprefix(_BEGIN) for line in done.stdout.splitlines() if line.startswith(_BEGIN)]
    assert len(told) == 1, done.stderr[-4000:]
    return [json.loads(line) for line in told]


def start(script: Path, *arguments: str, backend: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, with ``folder`` as the current one."""
    environment = {**os.environ, "PHALANX_BACKEND": backend, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def run(script: Path, *arguments: str, backend: str, folder: Path) -> str:
    """What the script printed; fails with all that it said if it did not end well."""
    ended = start(script, *arguments, backend=backend, folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
