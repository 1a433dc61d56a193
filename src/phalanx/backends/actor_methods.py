"""Names of the methods by which a worker process is called."""

from __future__ import annotations

from phalanx.wire.call_page import PLAIN_CALL

#: Keyword of a call without a message: the trace that it is in, its number there, and the bytes of its arguments; for
#: the process, not the method.
TRACED = "_px_traced"
NOT_TRACED = ("", PLAIN_CALL, 0)


def facade_name(role: str, method: str) -> str:
    """Name of the process's method for a method of a role; "" is the role of a group of one class."""
    return f"{role}__{method}" if role else method


def bare_name(name: str) -> str:
    """Name of the process's method for the same call without arguments."""
    return f"_px_bare_{name}"
