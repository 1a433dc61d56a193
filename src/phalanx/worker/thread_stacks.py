"""Stacks of all threads of this process, read by a thread that holds the interpreter.

``faulthandler`` can write the stacks of all threads from a signal handler, without the interpreter. But the threads
run on meanwhile, and frames that are being left are freed memory, which ends a process now and then. While a thread
holds the interpreter they cannot change.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import CodeType, FrameType

_FRAMES, _THREADS = 100, 100  # per thread, and threads, as in faulthandler
Frames = list[tuple[CodeType, int | None]]


def stacks() -> str:
    """Return the stacks as ``faulthandler`` writes them: innermost frame first, the main thread last.

    No garbage is collected meanwhile. Python 3.11 makes frames into objects under a lock that each new thread needs: a
    collection there runs finalizers, which may wait for such a thread forever
    (https://github.com/python/cpython/issues/106883).
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        frames = {ident: _frames(frame) for ident, frame in sys._current_frames().items()}
    finally:
        if collecting:
            gc.enable()
    main = threading.main_thread().ident
    others = [ident for ident in frames if ident != main][: _THREADS - 1]
    return "\n".join(_format(ident, frames[ident]) for ident in (*others, main) if ident in frames)


def _frames(frame: FrameType | None) -> Frames:
    """Return code and line from this frame outwards. The frames, and the values they hold, are released."""
    frames: Frames = []
    while frame is not None and len(frames) <= _FRAMES:
        frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return frames


def _format(ident: int, frames: Frames) -> str:
    lines = [
        f'  File "{code.co_filename}", line {line or "?"} in {code.co_name}'
        for code, line in frames[:_FRAMES]
    ]
    more = ["  ..."] if len(frames) > _FRAMES else []
    return "\n".join([f"Thread 0x{ident:016x} (most recent call first):", *lines, *more, ""])
