"""Where the threads of this process stand, read by one of them that holds the interpreter.

``faulthandler`` can write the stacks of all threads from a signal handler, without the interpreter; but these threads
run on meanwhile, and frames that are just being left are freed memory: that ends a process now and then. A thread that
holds the interpreter reads them while they cannot change.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import CodeType, FrameType

_FRAMES, _THREADS = 100, 100  # of a thread, and threads, as faulthandler has it
Frames = list[tuple[CodeType, int | None]]


def stacks() -> str:
    """The stacks of all threads as ``faulthandler`` writes them: innermost frame first, the main thread last."""
    with _collector_waits():
        found = {ident: _frames(frame) for ident, frame in sys._current_frames().items()}
    main = threading.main_thread().ident
    others = [ident for ident in found if ident != main][: _THREADS - 1]
    return "\n".join(_written(ident, found[ident]) for ident in (*others, main) if ident in found)


def _frames(frame: FrameType | None) -> Frames:
    """What is shown of the frames from this one outwards; they themselves are let go of, with the values they hold."""
    found: Frames = []
    while frame is not None and len(found) <= _FRAMES:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _written(ident: int, frames: Frames) -> str:
    lines = [
        f'  File "{code.co_filename}", line {line or "?"} in {code.co_name}'
        for code, line in frames[:_FRAMES]
    ]
    more = ["  ..."] if len(frames) > _FRAMES else []
    return "\n".join([f"Thread 0x{ident:016x} (most recent call first):", *lines, *more, ""])


@contextmanager
def _collector_waits() -> Generator[None]:
    """The time in which garbage is not collected.

    Python 3.11 makes frames into objects under a lock that each new thread needs: a collection there, which calls what
    it finds, can wait for such a thread for ever (https://github.com/python/cpython/issues/106883).
    """
    collecting = gc.isenabled()
    if collecting:
        gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
