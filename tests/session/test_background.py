"""The background thread, which starts with work and ends without work."""

from __future__ import annotations

import os
import threading

from phalanx.session.background import Background
from tests.support.fault_workers import within


def test_the_background_thread_starts_with_work_and_ends_after_the_last_turn() -> None:
    left, threads = [0.0, 0.0, None], set[str]()

    def turn() -> float | None:
        threads.add(threading.current_thread().name)
        return left.pop(0)

    one = Background(turn)
    assert not one.running
    one.begin()

    assert within(30.0, lambda: not left and not one.running)
    assert threads == {"phalanx-background"}


def test_work_that_arrives_during_a_turn_is_done_in_another_turn() -> None:
    turns: list[int] = []
    in_turn, go_on = threading.Event(), threading.Event()

    def turn() -> None:
        turns.append(1)
        in_turn.set()
        go_on.wait(30.0)

    one = Background(turn)
    one.begin()
    in_turn.wait(30.0)
    one.begin()
    go_on.set()

    assert within(30.0, lambda: not one.running and len(turns) == 2)


def test_a_turn_that_raised_is_repeated_and_does_not_delay_other_work() -> None:
    turns: list[str] = []

    def turn() -> None:
        turns.append("now")
        if len(turns) == 1:
            raise OSError

    later = Background(lambda: turns.append("later"), first_after=0.05)
    one = Background(turn)
    one.begin()
    later.begin()

    assert within(30.0, lambda: turns == ["now", "later", "now"] and not one.running)


def test_background_work_that_runs_during_a_fork_can_be_started_in_the_child() -> None:
    in_turn, go_on = threading.Event(), threading.Event()

    def turn() -> None:
        in_turn.set()
        go_on.wait(30.0)

    one = Background(turn)
    one.begin()
    in_turn.wait(30.0)
    child = os.fork()
    if not child:
        idle, in_turn = not one.running, threading.Event()
        one.begin()
        os._exit(0 if idle and in_turn.wait(30.0) else 1)
    go_on.set()

    assert os.waitpid(child, 0)[1] == 0
