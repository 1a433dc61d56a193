"""Causes of failed calls and lost ranks: Ray's exceptions, log files, and the kernel's count of out-of-memory kills.

Code outside of this package never sees exceptions of Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ray import exceptions as rayx

from phalanx.backends.backend_types import Lost, RankOutcome, read_file
from phalanx.backends.ray import private
from phalanx.backends.ray.cluster import answers
from phalanx.display.log_merging import is_shown
from phalanx.topology.slots import SlotInfo
from phalanx.wire import codec
from phalanx.wire.failure import RankFailure, capture, undecodable

_INTENDED = ("ray.kill", "INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT", "ray.actor.exit_actor")
_OWNER_GONE = ("owner has died", "OWNER_DIED")
_EXIT_CODE = re.compile(r"exit code[: ]+(-?\d+|[^.\n]+)", re.IGNORECASE)  # sys.exit also takes a text
_DETAIL = re.compile(r"Worker exit detail: (.*)", re.IGNORECASE)
_NODE_GONE = re.compile(r"node (?:was terminated|has died|died|is dead|failure)|its node", re.IGNORECASE)
_TUNING = (
    "Ray itself calls a node dead after some 15 s; shorter: ray start --system-config "
    '\'{"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}\''
)
_OOM_BY_RAY = (
    "Ray's memory monitor ended it because the node was short of memory: use smaller batches, fewer ranks per "
    "node, or see RAY_memory_usage_threshold"
)
_OOM_BY_KERNEL = "the kernel ended a process for lack of memory on that node"
_SAYS_NOTHING = ("Worker unexpectedly exits", "Worker exits unexpectedly")
_UNEXPECTED = "its process ended unexpectedly"
_NO_EXIT = "SIGKILL, such as for lack of memory, or os._exit, which look the same from outside"
_RAYLET_WITHIN_S = 0.5
_PACKAGE = Path(__file__).parents[2]
_HOST_CODE = tuple(f"{_PACKAGE / package}{os.sep}" for package in ("compat", "worker", "backends"))


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Return False for errors while decoding a value, which are raised as the error of the call anyway."""
    frames = traceback.walk_tb(record.exc_info[2] if record.exc_info else None)
    return all(frame.f_code.co_filename != codec.__file__ for frame, _ in frames)


def log_once() -> None:
    """Keep Ray from logging a traceback at each attempt to fetch a value that cannot be decoded. Idempotent."""
    logging.getLogger(private.SERIALIZATION_LOGGER).addFilter(_is_not_raised)


def outcome_of(error: BaseException) -> RankOutcome:
    """Return the outcome of a call for which Ray raised ``error``, or whose output raised it when unpickled."""
    if isinstance(error, rayx.RayTaskError):
        cause: Any = error.cause
        if isinstance(cause, RankFailure):
            return RankOutcome(failure=cause)
        if isinstance(cause, BaseException):
            report = replace(capture(cause).report, traceback=remote_traceback(str(error)))
            return RankOutcome(failure=RankFailure(report))
        return RankOutcome(failure=capture(error))
    if isinstance(error, rayx.RayError):
        return RankOutcome(lost=lost_of(error))
    return RankOutcome(failure=undecodable(error))


def remote_traceback(text: str) -> str:
    """Return Ray's text of a remote traceback without this library's frames."""
    lines: list[str] = []
    ours = False
    for line in text.strip().splitlines():
        # This line names process and method, as the report does. Remains of Ray's frames follow.
        if "ray::" in line:
            lines.append("Traceback (most recent call last):")
            ours = True
            continue
        if not line.startswith("    "):  # not a source line
            ours = line.startswith('  File "') and any(part in line for part in _HOST_CODE)
        if not ours:
            lines.append(line)
    return "\n".join(lines)


def lost_of(error: BaseException) -> Lost:
    """Return the loss that an exception of Ray describes."""
    text = str(error)
    hint = _OOM_BY_RAY if isinstance(error, rayx.OutOfMemoryError) or "memory monitor" in text else None
    if isinstance(error, rayx.NodeDiedError):
        return Lost(_first_line(text), "node lost", _TUNING, node_lost=True)
    if isinstance(error, rayx.ActorUnavailableError):
        return Lost("its process cannot be reached", "unreachable", hint)
    if isinstance(error, rayx.ObjectLostError):
        return Lost("a stored result was lost with the process or node that held it", "object lost", hint)
    if isinstance(error, rayx.ActorDiedError):
        if getattr(error, "preempted", False):
            hint = "its node was preempted"
        if _NODE_GONE.search(text) and _DETAIL.search(text) is None:
            return Lost("its node was lost", "node lost", hint or _TUNING, node_lost=True)
        owner_gone = any(word in text for word in _OWNER_GONE)
        intended = owner_gone or any(word in text for word in _INTENDED)
        return Lost(_reason(text), _exit_of(text), hint, intended=intended, owner_gone=owner_gone)
    return Lost(f"{type(error).__name__}: {_first_line(text)}", None, hint)


def _exit_of(text: str) -> str | None:
    if "receives a SIGTERM" in text:
        return "signal SIGTERM"
    if (found := _EXIT_CODE.search(text)) is None:
        return None
    code = found.group(1)
    return f"signal {code[1:]}" if code.startswith("-") else f"exit code {code}"


def _reason(text: str) -> str:
    """Return Ray's sentence about the end of a worker, or ``_UNEXPECTED`` if it has no more information."""
    detail = _DETAIL.search(text)
    said = detail.group(1).split(". ")[0].strip(" .") if detail else _first_line(text)
    return _UNEXPECTED if said.startswith(_SAYS_NOTHING) else said


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def with_post_mortem(lost: Lost, left: PostMortem | None, log_path: str | None) -> Lost:
    """Return ``lost`` with the post-mortem: signal and stack of a crash, last log lines, a hint at lack of memory."""
    if left is None:
        return replace(lost, log_path=log_path)
    exit = f"signal {left.fatal_signal}" if left.fatal_signal else lost.exit
    if exit is None and not lost.intended:
        exit = _NO_EXIT
    return replace(
        lost,
        reason="" if exit and lost.reason == _UNEXPECTED else lost.reason,  # the exit is more specific
        exit=exit,
        hint=lost.hint or (_OOM_BY_KERNEL if left.oom_kills > 0 else None),
        log_tail=left.log_tail,
        log_path=log_path,
        stack=left.stack,
    )


def node_is_gone(node_id: str) -> bool:
    """Return whether a node is known to be dead, or its raylet refuses connections."""
    with contextlib.suppress(Exception):  # the cluster does not respond: unknown
        node = next((node for node in private.nodes() if node["NodeID"] == node_id), None)
        if node is None or not node["Alive"]:
            return True
        address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        return not answers(address, _RAYLET_WITHIN_S)
    return False


def of_node(lost: Lost, slot: SlotInfo) -> Lost:
    """Return ``lost`` changed into the loss of the rank's node."""
    return replace(
        lost,
        reason=f"node {slot.node_id[:8]} (host {slot.host}) was lost",
        exit="node lost",
        hint=lost.hint or _TUNING,
        node_lost=True,
    )


_LOG_BYTES = 64 * 1024
_OUT_LINES, _ERR_LINES, _STACK_LINES = 20, 20, 60
_FATAL = "Fatal Python error: "
_FATAL_SIGNALS = {signal.strsignal(signum): signum.name for signum in signal.Signals}


class PostMortem(NamedTuple):
    """Traces of a dead process: last log lines, signal and stack of a crash, new out-of-memory kills on its node."""

    log_tail: tuple[str, ...] = ()
    fatal_signal: str | None = None
    stack: str = ""
    oom_kills: int = 0


def read_logs(paths: Sequence[str]) -> PostMortem:
    """Return the last lines of a process's log files, and the signal and stack that the interpreter logged.

    A rank has a single file for all its output. Ray's two files have the output from before the process was a rank.
    """
    own, out, err = (
        [line for path in paths if path.endswith(suffix) for line in last_lines(path)]
        for suffix in (".log", ".out", ".err")
    )
    if own:
        out, err = [], own
    fatal = next((index for index, line in enumerate(err) if _FATAL in line), None)
    if fatal is None:
        return PostMortem((*out[-_OUT_LINES:], *err[-_ERR_LINES:]))
    # Output without a final newline precedes the text on the same line.
    before, _, name = err[fatal].partition(_FATAL)
    rest = [line for line in err[fatal + 1 :] if not line.startswith("Extension modules:")]
    said = [*err[:fatal], before] if before else err[:fatal]
    return PostMortem(
        log_tail=(*out[-_OUT_LINES:], *said[-_ERR_LINES:]),
        fatal_signal=_FATAL_SIGNALS.get(name.strip().replace("-", " ")),
        stack="\n".join([_FATAL + name, *rest][:_STACK_LINES]),
    )


def last_lines(path: str) -> list[str]:
    """Return the lines in the last 64 KiB of a log file, without Ray's marker lines."""
    try:
        text = read_file(path, -_LOG_BYTES, _LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line and is_shown(line)]


def oom_kills() -> int:
    """Return the number of out-of-memory kills in this process's control group (v2, else v1); 0: unknown."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[-1])
    return 0
