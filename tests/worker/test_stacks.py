"""Stacks of all threads of a process, read by one of its threads."""

from __future__ import annotations

import gc
import threading

from phalanx.worker.control import stacks


def test_all_threads_are_there_with_the_main_thread_last_and_innermost_frames_first() -> None:
    waits, go_on = threading.Event(), threading.Event()

    def waiting() -> None:
        waits.set()
        go_on.wait()

    thread = threading.Thread(target=waiting)
    thread.start()
    waits.wait()
    blocks = stacks().split("Thread 0x")[1:]
    go_on.set()
    thread.join()

    assert [block for block in blocks if "in waiting" in block] != []
    main = blocks[-1].splitlines()
    own = next(i for i, line in enumerate(main) if "in test_all_threads_are_there" in line)
    assert "in stacks" in main[own - 1]
    assert main[own].startswith(f'  File "{__file__}", line ')


def test_a_deep_stack_is_shortened_to_its_innermost_frames() -> None:
    def deep(more: int) -> str:
        return deep(more - 1) if more else stacks()

    main = deep(150).split("Thread 0x")[-1].rstrip().splitlines()

    assert len(main) == 102
    assert main[-1] == "  ..."


def test_reading_stacks_keeps_the_garbage_collector_enabled_or_disabled() -> None:
    before = gc.isenabled()
    try:
        for collecting, turn in ((True, gc.enable), (False, gc.disable)):
            turn()
            stacks()
            assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()
