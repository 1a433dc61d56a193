"""Settings, frozen; the only reader of environment variables on the driver."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.errors import DeclarationError

BACKENDS = ("ray", "inline")
_MARKS = ("PHALANX_PROCESS", "PHALANX_STORE")  # of one process, and no settings
_OFF = ("", "0", "false", "off", "no")
Shown = Literal["all", "merged"] | tuple[int, ...]
"""The ranks whose output the driver shows; "merged": all, with equal lines of several ranks shown once."""


@dataclass(frozen=True)
class Settings:
    """Defaults of a run.

    Attributes:
        backend: "ray" or "inline" (``PHALANX_BACKEND``).
        inline_bytes: arguments up to this size travel inside the message, larger ones are stored once
            (``PHALANX_INLINE_BYTES``); see docs/performance.md for the measurement behind the default.
        grace_s: how long the other ranks of a failed call may take to return or raise (``PHALANX_GRACE``).
        start_timeout: seconds within which a group must have started (``PHALANX_START_TIMEOUT``).
        call_timeout: deadline in seconds of the calls of groups that have none of their own
            (``PHALANX_CALL_TIMEOUT``).
        debug: compare the order of calls, and outputs declared replicated (``PHALANX_DEBUG``).
        max_in_flight: submitted calls per group that may wait at once (``PHALANX_MAX_IN_FLIGHT``).
        show_ranks: whose output the driver shows: "all", "merged", "none" or ranks as in "0,3"
            (``PHALANX_SHOW_RANKS``).
        progress: whether waits of more than 2 s are shown in a terminal (``PHALANX_PROGRESS``).
        metrics: whether calls are counted in Ray's metrics (``PHALANX_METRICS``, on unless it is 0).
        trace: where to write a trace of the whole run (``PHALANX_TRACE``); see ``px.trace``.
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
    """The settings as the environment has them now.

    Raises:
        DeclarationError: a variable has a value of the wrong kind.
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


def threads_by_choice() -> str | None:
    """Return the thread count that the user chose for this process (``OMP_NUM_THREADS``)."""
    return os.environ.get("OMP_NUM_THREADS") or None


def overlays_verl(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an installed verl is to have this library as its controller (``PHALANX_VERL=1``)."""
    return _is_on(environment.get("PHALANX_VERL", ""))


def own_variables() -> dict[str, str]:
    """The variables of this library that are set here, for a process that shall have the same settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PHALANX_") and name not in _MARKS
    }


def backend_name(given: str) -> str:
    """``given`` if it names a backend.

    Raises:
        DeclarationError: it does not.
    """
    if given not in BACKENDS:
        raise DeclarationError(f"backend {given!r}: expected one of {', '.join(BACKENDS)}")
    return given


def shown_ranks(given: Any) -> Shown:
    """The ranks that ``given`` names: "all", "merged", "none", a rank, a list of ranks, or a text such as "0,3".

    Raises:
        DeclarationError: it is nothing of this.
    """
    if given in ("all", "merged", "none"):
        return () if given == "none" else given
    ranks: Any = given
    if isinstance(given, str):
        ranks = [int(part) if part.strip().isdecimal() else part for part in given.split(",")]
    elif isinstance(given, int):
        ranks = [given]
    if not isinstance(ranks, Sequence) or not all(map(_is_rank, ranks)):
        raise DeclarationError(
            f"show_ranks={given!r}: expected 'all', 'merged', 'none', or ranks such as [0, 3] or '0,3'"
        )
    return tuple(ranks)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def running_cluster() -> str | None:
    """The address of the cluster that the environment names (``RAY_ADDRESS``)."""
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
