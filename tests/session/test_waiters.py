"""The threads behind ``await future`` and ``px.gather``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest

from phalanx.session.session import session
from phalanx.session.wait_threads import _SPARE, Pending, WaitThreads
from tests.support.fault_workers import within


class Events:
    """A backend whose references are events."""

    def wait(self, refs: Sequence[Any], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        ended = [ref.is_set() for ref in refs]
        return [i for i, end in enumerate(ended) if end], [i for i, end in enumerate(ended) if not end]


def pending(*events: threading.Event, deadline: float | None = None, backend: Any = None) -> Pending:
    return Pending(backend or Events(), events, deadline)


@pytest.fixture
def occupied() -> Any:
    """Wait threads that are both occupied by an unfinished wait."""
    never = threading.Event()
    waiters = WaitThreads(most=2, idle_s=0.2)
    for _ in range(2):
        waiters.submit(never.wait, pending(never))
    yield waiters
    never.set()
    assert within(30.0, lambda: not waiters._threads)


def test_a_wait_that_never_ends_does_not_keep_the_process_from_exiting() -> None:
    code = (
        "import threading\nfrom phalanx.session.session import session\n"
        "session.waiters.submit(threading.Event().wait)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_work_without_references_cannot_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", Mock())  # which never begins
    assert not WaitThreads().submit(int).cancel()


def test_a_forked_child_waits_with_threads_of_its_own() -> None:
    session.waiters.submit(int).result()  # its thread is idle
    child = os.fork()
    if not child:
        os._exit(session.waiters.submit(lambda: 7).result(20))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_idle_thread_is_used_again_also_after_a_wait_that_raised() -> None:
    waiters = WaitThreads(idle_s=30.0)
    first = waiters.submit(threading.get_ident).result()
    assert within(30, lambda: waiters._idle)
    assert isinstance(waiters.submit(lambda: divmod(7, 0)).exception(), ZeroDivisionError)
    assert within(30, lambda: waiters._idle)  # the thread becomes idle after the result is set
    assert waiters.submit(threading.get_ident).result() == first


def test_300_waits_without_references_run_concurrently() -> None:
    waiters, all_here = WaitThreads(), threading.Barrier(300)
    futures = [waiters.submit(lambda: all_here.wait(30.0)) for _ in range(300)]
    assert sorted(future.result() for future in futures) == list(range(300))


def test_500_waits_share_4_threads_and_all_end() -> None:
    waiters = WaitThreads(most=4)
    events = [threading.Event() for _ in range(500)]
    futures = [waiters.submit(event.wait, pending(event)) for event in events]
    assert waiters._threads == 4
    for event in reversed(events):
        event.set()

    assert all(future.result(30.0) for future in futures)


OVER, NEVER = threading.Event(), threading.Event()
OVER.set()


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(pending(OVER), id="it has ended"),
        pytest.param(pending(OVER, NEVER), id="a part of it has ended, which may have failed"),
        pytest.param(pending(NEVER, deadline=0.0), id="its deadline is over"),
        pytest.param(
            pending(NEVER, backend=Mock(wait=Mock(side_effect=OSError))), id="its backend cannot be asked"
        ),
    ],
)
def test_a_wait_that_can_end_does_not_queue_behind_unfinished_waits(
    occupied: WaitThreads, wait: Pending
) -> None:
    assert occupied.submit(lambda: "here", wait).result(30.0) == "here"


def test_partly_finished_waits_use_only_spare_threads_and_delay_no_finished_wait() -> None:
    waiters, never = WaitThreads(most=2), threading.Event()
    futures = [waiters.submit(never.wait, pending(OVER, never)) for _ in range(100)]
    assert within(
        30.0, lambda: waiters._threads == 2 + _SPARE
    )  # once they are partly finished for long enough

    assert waiters.submit(lambda: "here", pending(OVER)).result(30.0) == "here"
    assert waiters._threads <= 2 + _SPARE + 1
    never.set()
    assert all(future.result(30.0) for future in futures)


def test_waits_that_depend_on_each_other_all_end() -> None:
    waiters = WaitThreads(most=2)

    def nested(depth: int) -> Callable[[], int]:
        return lambda: 0 if not depth else 1 + waiters.submit(nested(depth - 1), pending(OVER)).result()

    futures = [waiters.submit(nested(20), pending(OVER)) for _ in range(3)]

    assert [future.result(60.0) for future in futures] == [20, 20, 20]


def test_a_cancelled_wait_never_runs(occupied: WaitThreads) -> None:
    begun, over = threading.Event(), threading.Event()
    future = occupied.submit(begun.set, pending(over))
    future.cancel()
    over.set()
    occupied.submit(int, pending(over)).result(30.0)

    assert not begun.is_set()
