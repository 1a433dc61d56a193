"""Processes of this machine seen from outside: their deaths and their stacks, without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.backends.ray.rank_processes import ProcessHandle, readable_stack, stacks_of
from phalanx.wire.messages import SideChannel

SCRIPT = Path(__file__).with_name("stacks_script.py")


@contextmanager
def process(*doing: str) -> Iterator[ProcessHandle]:
    """Start a process that runs a function of the script, and check that it still runs at the end."""
    with subprocess.Popen([sys.executable, SCRIPT, *doing], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield ProcessHandle(child.pid, SideChannel(*json.loads(child.stdout.readline())))
            assert child.poll() is None
        finally:
            child.kill()


def spinning(target: ProcessHandle) -> str:
    """Return the stack of a process once its native code holds the interpreter."""
    for _ in range(100):
        ((text, why),) = stacks_of([target])
        assert not why
        if "only this thread" in text:
            return text
    pytest.fail(f"it does not hold the interpreter, but is at {text}")


def test_reading_stacks_100_times_does_not_disturb_imports_and_thread_starts() -> None:
    with process("imports_and_starts_threads") as target:
        read = [stacks_of([target])[0] for _ in range(100)]

    assert [why for text, why in read if not text or why] == []


@pytest.mark.parametrize("handler", ["takes_the_signal", "leaves_it"])
def test_the_stack_of_a_waiting_process_is_read_without_a_signal(handler: str) -> None:
    with process("sleeps", handler) as target:
        texts = (stacks_of([target])[0] for _ in range(100))  # the process may not sleep yet
        text, why = next((text, why) for text, why in texts if "in sleeps" in text)

    assert why == ""
    assert "in sleeps" in text.splitlines()[0]
    assert "more thread" in text


@pytest.mark.parametrize("doing", [["holds_the_interpreter"], ["runs_calls", "on_a_thread"]])
def test_a_signal_reads_the_thread_that_runs_calls_if_native_code_holds_the_interpreter(
    doing: list[str],
) -> None:
    with process(*doing) as target:
        assert f"in {doing[0]}" in spinning(target)


def test_a_process_that_ignores_the_signal_and_holds_the_interpreter_is_reported_unreadable() -> None:
    with process("holds_the_interpreter", "takes_the_signal") as target:
        answers = (stacks_of([target])[0] for _ in range(100))
        why = next((why for _, why in answers if why), "")

    assert "SIGUSR2 is not caught" in why


def test_a_readable_stack_shows_the_thread_that_runs_the_call_without_frames_of_the_library() -> None:
    step = '  File "/job/train.py", line 5 in step\n'
    ours = '  File "/x/phalanx/worker/worker_runtime.py", line 9 in _invoke\n'
    dump = (
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n'
        f"Thread 0x2 (most recent call first):\n{step}{ours}"
        '  File "/x/ray/worker.py", line 3 in main_loop\n'
        'Current thread 0x3 (most recent call first):\n  File "/x/other.py", line 2 in run\n'
    )

    assert readable_stack(dump) == 'File "/job/train.py", line 5 in step\n(2 more threads)'
    assert readable_stack(f"Stack (most recent call first):\n{step}{ours}").splitlines() == [
        'File "/job/train.py", line 5 in step',
        "(native code holds the interpreter: only this thread could be read)",
    ]


@pytest.mark.parametrize("threads", [0, 4])
def test_a_killed_process_is_reported_as_dying_from_then_on(threads: int) -> None:
    script = f"""
import threading, time
for _ in range({threads}):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
much = b"x" * (100 << 20)
print(flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        target = ProcessHandle(child.pid)
        assert child.stdout is not None
        child.stdout.readline()
        assert not target.dies()
        os.kill(child.pid, signal.SIGKILL)
        for _ in range(1000):  # until the process is a zombie, and later
            assert target.dies()
