"""Names of semaphores, as an engine's processes have them; no vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")

SCRIPT = """
import multiprocessing, os, signal, sys
from multiprocessing import resource_tracker
from phalanx.engines.vllm.shared_memory import disown_semaphores, own_semaphores, unlink_shared_memory

def other(lock, pipe):
    pipe.send("has it open")
    pipe.recv()
    pipe.send(lock.acquire(timeout=0))
    unlink_shared_memory()

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    earlier, others = spawn.Lock(), own_semaphores()
    lock, (mine, theirs) = spawn.Lock(), spawn.Pipe()
    process = spawn.Process(target=other, args=(lock, theirs))
    process.start()
    mine.recv()
    disown_semaphores(but=others)
    print(*[name.strip("/") for name in (earlier._semlock.name, lock._semlock.name)], flush=True)
    sys.stdin.readline()
    lock.acquire()
    mine.send("try")
    print(mine.recv(), flush=True)
    process.join()
    if sys.argv[1:] == ["killed"]:
        os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def named(name: str) -> bool:
    return Path("/dev/shm", f"sem.{name}").exists()


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_semaphore_that_all_have_open_needs_no_name(tmp_path: Path, end: str) -> None:
    """It still holds between them; others of the process keep theirs; and neither end says or leaves anything."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(script), end], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        earlier, late = process.stdout.readline().split()
        try:
            assert (named(earlier), named(late)) == (True, False)
            told, said = process.communicate("go on\n")
            assert (told.strip(), said) == ("False", "")
            assert named(earlier) == (end == "killed")
        finally:
            Path("/dev/shm", f"sem.{earlier}").unlink(missing_ok=True)
