"""A rank's process as one beside it sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from phalanx.backends.ray.rank_processes import ProcessHandle


@pytest.mark.parametrize("threads", [0, 4])
def test_a_process_that_was_killed_is_known_to_die_from_then_on(threads: int) -> None:
    script = f"""
import threading, time
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
much = b"x" * (100 << 20)
print(flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        target = ProcessHandle(child.pid, None)
        assert child.stdout is not None
        child.stdout.readline()
        assert not target.dies()
        os.kill(child.pid, signal.SIGKILL)
        for _ in range(1000):  # until it is a zombie, and beyond
            assert target.dies()
