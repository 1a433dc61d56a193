"""Settings of a run, and checks of options; the only reader of environment variables on the driver."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from phalanx.errors import DeclarationError

BACKENDS = ("ray", "inline")
_MARKS = ("PHALANX_PROCESS", "PHALANX_STORE")  # of a single process; not settings
_OFF = ("", "0", "false", "off", "no")
Shown = Literal["all", "merged"] | tuple[int, ...]
"""Ranks whose output the driver shows; "merged": all, but equal lines of several ranks only once."""


@dataclass(frozen=True)
class Settings:
    """Defaults of a run.

    Attributes:
        backend: "ray" or "inline" (``PHALANX_BACKEND``).
        inline_bytes: maximum size in bytes of arguments that are sent in the message; larger arguments are stored once
            (``PHALANX_INLINE_BYTES``). docs/performance.md has the measurement behind the default.
        grace_s: seconds for the other ranks of a failed call to return or raise (``PHALANX_GRACE``).
        start_timeout: seconds within which a group has to start (``PHALANX_START_TIMEOUT``).
        call_timeout: default deadline of calls in seconds (``PHALANX_CALL_TIMEOUT``); None: no deadline.
        debug: True to compare the order of calls, and outputs that are declared replicated (``PHALANX_DEBUG``).
        max_in_flight: maximum number of submitted calls in flight per group (``PHALANX_MAX_IN_FLIGHT``).
        show_ranks: ranks whose output the driver shows: "all", "merged", "none" or ranks as in "0,3"
            (``PHALANX_SHOW_RANKS``).
        progress: True to show progress bars in a terminal (``PHALANX_PROGRESS``).
        metrics: True to count calls in Ray's metrics (``PHALANX_METRICS``, on unless it is 0).
        trace: path for a trace of the complete run (``PHALANX_TRACE``); see ``px.trace``.
    """

    backend: str = "ray"
    inline_bytes: int = 96 * 1024
    grace_s: float = 1.0
    start_timeout: float = 300.0
    call_timeout: float | None = None
    debug: bool = False
    max_in_flight: int = 1000
    show_ranks: Shown = (0,)
    progress: bool = True
    metrics: bool = True
    trace: str | None = None


def settings() -> Settings:
    """Return the settings, read from the environment variables now.

    Raises:
        DeclarationError: if a variable has an invalid value.
    """
    return Settings(
        backend=backend_name(os.environ.get("PHALANX_BACKEND") or "ray"),
        inline_bytes=int(_number("PHALANX_INLINE_BYTES", Settings.inline_bytes)),
        grace_s=_number("PHALANX_GRACE", Settings.grace_s),
        start_timeout=_number("PHALANX_START_TIMEOUT", Settings.start_timeout),
        call_timeout=_number("PHALANX_CALL_TIMEOUT", 0.0) or None,
        debug=_is_on(os.environ.get("PHALANX_DEBUG", "")),
        max_in_flight=int(_number("PHALANX_MAX_IN_FLIGHT", Settings.max_in_flight)),
        show_ranks=shown_ranks(os.environ.get("PHALANX_SHOW_RANKS") or Settings.show_ranks),
        progress=_is_on(os.environ.get("PHALANX_PROGRESS") or "1"),
        metrics=_is_on(os.environ.get("PHALANX_METRICS") or "1"),
        trace=os.environ.get("PHALANX_TRACE") or None,
    )


def overlays_verl() -> bool:
    """Return whether an installed verl has to use this library as its controller (``PHALANX_VERL=1``)."""
    return _is_on(os.environ.get("PHALANX_VERL", ""))


def own_variables() -> dict[str, str]:
    """Return this library's environment variables that are set here, for processes with the same settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PHALANX_") and name not in _MARKS
    }


def backend_name(given: str) -> str:
    """Return ``given`` if it names a backend.

    Raises:
        DeclarationError: if it does not.
    """
    if given not in BACKENDS:
        raise DeclarationError(f"backend {given!r}: expected one of {', '.join(BACKENDS)}")
    return given


def shown_ranks(given: Any) -> Shown:
    """Return the shown ranks for ``given``: "all", "merged", "none", a rank, a list of ranks, or text such as "0,3".

    Raises:
        DeclarationError: if ``given`` is none of these.
    """
    if given in ("all", "merged", "none"):
        return () if given == "none" else given
    ranks: Any = given
    if isinstance(given, str):
        ranks = [int(part) if part.strip().isdecimal() else part for part in given.split(",")]
    elif as_integer(given) is not None:
        ranks = [given]
    if not isinstance(ranks, Sequence) or not all(is_whole(rank, 0) for rank in ranks):
        raise DeclarationError(
            f"show_ranks={given!r}: expected 'all', 'merged', 'none', or ranks such as [0, 3] or '0,3'"
        )
    return tuple(map(int, ranks))


def as_integer(value: Any) -> int | None:
    """Return a Python or NumPy integer, or a tensor with a single integer, as an int; None for other values."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def is_whole(value: object, least: float = -math.inf) -> bool:
    """Return whether :func:`as_integer` takes a value, and the number is at least ``least``."""
    number = as_integer(value)
    return number is not None and number >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def running_cluster() -> str | None:
    """Return the address of the cluster that ``RAY_ADDRESS`` names, or None."""
    return os.environ.get("RAY_ADDRESS") or None


def _is_on(text: str) -> bool:
    return text.strip().lower() not in _OFF


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise DeclarationError(f"environment variable {name}={text!r}: expected a number, 0 or more")
