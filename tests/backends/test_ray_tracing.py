"""A cluster whose own tracing is on."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_calls_with_and_without_arguments_work_while_ray_traces_them() -> None:
    script = Path(__file__).with_name("ray_tracing_script.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=170, check=False
    )
    assert "FOUND [0, 1] [1, 2] [0, 1] [0, 1]" in done.stdout, done.stderr[-4000:]
