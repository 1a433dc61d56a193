"""Post-mortem of a rank on its node: its log files and the memory books of the kernel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.display.log_merging import is_shown

_LOG_BYTES = 64 * 1024
_OUT_LINES, _ERR_LINES, _STACK_LINES = 20, 20, 60
_FATAL = "Fatal Python error: "
_FATAL_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


class PostMortem(NamedTuple):
    """Remains of a rank's process: its last lines, the stack of a crash, and the kernel's memory counters."""

    log_tail: tuple[str, ...] = ()
    fatal_signal: str | None = None
    stack: str = ""
    oom_kills: int = 0
    memory: int = 0
    node_memory: int = 0


def read_logs(paths: Sequence[str]) -> PostMortem:
    """Return the last lines of a process's log files, and the signal and stack that the interpreter logged.

    A rank has a file for all its output; Ray has two files, with the output before that.
    """
    own = [line for path in paths if path.endswith(".log") for line in last_lines(path)]
    out = [] if own else [line for path in paths if path.endswith(".out") for line in last_lines(path)]
    err = own or [line for path in paths if path.endswith(".err") for line in last_lines(path)]
    fatal = next((index for index, line in enumerate(err) if _FATAL in line), None)
    if fatal is None:
        return PostMortem((*out[-_OUT_LINES:], *err[-_ERR_LINES:]))
    # The text follows the last output on the same line, if that output had no newline.
    before, _, signal = err[fatal].partition(_FATAL)
    rest = [line for line in err[fatal + 1 :] if not line.startswith("Extension modules:")]
    said = [*err[:fatal], before] if before else err[:fatal]
    return PostMortem(
        log_tail=(*out[-_OUT_LINES:], *said[-_ERR_LINES:]),
        fatal_signal=_FATAL_SIGNALS.get(signal.strip()),
        stack="\n".join([_FATAL + signal, *rest][:_STACK_LINES]),
    )


def last_lines(path: str) -> list[str]:
    """Return the last lines of a log file without Ray's marker lines."""
    try:
        with open(path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line and is_shown(line)]


def oom_kills() -> int:
    """Return the number of out-of-memory kills that the kernel counted in this control group (v2, then v1)."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError), open(path) as events:
            for line in events:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def node_memory() -> int:
    """Return the memory of the node, or of its control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as limit:
            return min(total, int(limit.read()))
    return total
