"""The folder for temporary files of a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OWNER = """
import os
import phalanx as px
px.init(backend="inline")
group = px.WorkerGroup(px.ResourcePool([1], use_gpu=False), px.Worker)
if not os.fork():
    raise SystemExit
os.wait()
print(len(os.listdir(os.environ["TMPDIR"])))
"""


def test_a_process_removes_its_folder_at_exit_and_its_fork_does_not(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", OWNER], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "1\n", ran.stderr
    assert not list(tmp_path.iterdir())
