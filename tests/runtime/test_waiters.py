"""The threads behind ``await future`` and ``px.gather``."""

from __future__ import annotations

import subprocess
import sys
import threading

from phalanx.runtime.session.waiters import Waiters

LEFT_WAITING = """
import threading
from phalanx.runtime.session.waiters import waiters
waiters.submit(threading.Event().wait)
"""


def test_a_wait_that_never_ends_does_not_keep_the_process_from_exiting() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_WAITING], timeout=30)
    assert done.returncode == 0


def test_a_wait_gives_what_the_function_gives_or_raises() -> None:
    waiters = Waiters()
    assert waiters.submit(divmod, 7, 2).result() == (3, 1)
    assert isinstance(waiters.submit(divmod, 7, 0).exception(), ZeroDivisionError)


def test_no_wait_stands_in_line_behind_others() -> None:
    waiters, all_here = Waiters(), threading.Barrier(300)
    futures = [waiters.submit(all_here.wait, 30.0) for _ in range(300)]
    assert sorted(future.result() for future in futures) == list(range(300))


def test_threads_are_used_again() -> None:
    waiters = Waiters()
    first = waiters.submit(threading.get_ident).result()
    assert waiters._idle.acquire(timeout=30)  # it is idle once it says so
    waiters._idle.release()
    assert waiters.submit(threading.get_ident).result() == first
