"""Ray's exceptions, mapped at this one boundary to what the rest of the library knows."""

from __future__ import annotations

import re
from typing import Any

from ray import exceptions as rayx

from phalanx.transport.base import Lost, Outcome
from phalanx.wire.failure import RankFailure, capture

_INTENDED = (
    "ray.kill",
    "INTENDED_USER_EXIT",
    "INTENDED_SYSTEM_EXIT",
    "ray.actor.exit_actor",
    "owner has died",
    "OWNER_DIED",
)
_EXIT_CODE = re.compile(r"exit code[: ]+(-?\d+)", re.IGNORECASE)


def outcome_of(error: BaseException) -> Outcome:
    """How a call ended that Ray reports with ``error``."""
    if isinstance(error, rayx.RayTaskError):
        cause: Any = error.cause
        if isinstance(cause, RankFailure):
            return Outcome(failure=cause)
        if isinstance(cause, BaseException):
            return Outcome(failure=capture(cause))
        return Outcome(failure=capture(error))
    return Outcome(lost=lost_of(error))


def lost_of(error: BaseException) -> Lost:
    """What Ray tells of a process, or an object, that is gone."""
    text = str(error)
    hint = None
    if isinstance(error, rayx.OutOfMemoryError) or ("OOM" in text and "memory monitor" in text.lower()):
        hint = "Ray's memory monitor killed it: the node ran out of memory; use smaller batches or fewer ranks per node"
    node_lost = isinstance(error, rayx.NodeDiedError) or ("node" in text.lower() and "died" in text.lower())
    if isinstance(error, rayx.ActorUnavailableError):
        return Lost("its process or its node cannot be reached", "unreachable", hint, node_lost=True)
    if isinstance(error, rayx.ObjectLostError):
        return Lost("a stored result is gone with the process or node that held it", "object lost", hint)
    if isinstance(error, rayx.ActorDiedError):
        return Lost(
            _first_line(text),
            _exit_of(text),
            hint,
            intended=any(word in text for word in _INTENDED),
            node_lost=node_lost and "exit detail" not in text,
        )
    return Lost(f"{type(error).__name__}: {_first_line(text)}", None, hint, node_lost=node_lost)


def _exit_of(text: str) -> str | None:
    found = _EXIT_CODE.search(text)
    if found and found.group(1) not in ("", "2"):
        code = int(found.group(1))
        return f"exit code {code}" if code >= 0 else f"signal {-code}"
    if "connection error code 2" in text:
        # SIGKILL, a segfault, abort and os._exit look the same to Ray (research: ray-facts section 6).
        return "killed by a signal or left by os._exit (SIGKILL, the kernel's OOM killer, a segfault or an abort)"
    if "SIGTERM" in text:
        return "signal SIGTERM"
    return None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
