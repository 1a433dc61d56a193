"""Settings, frozen; the only reader of environment variables on the driver."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.errors import DeclarationError

BACKENDS = ("ray", "inline")


@dataclass(frozen=True)
class Settings:
    """Defaults of a run.

    Attributes:
        backend: "ray" or "inline" (``PHALANX_BACKEND``).
        inline_bytes: arguments up to this size travel inside the message, larger ones are stored once
            (``PHALANX_INLINE_BYTES``); see docs/performance.md for the measurement behind the default.
        grace_s: how long the other ranks of a failed call may take to return or raise (``PHALANX_GRACE``).
        start_timeout: seconds within which a group must have started (``PHALANX_START_TIMEOUT``).
        debug: compare outputs declared replicated, check read-only tensors (``PHALANX_DEBUG``).
        max_in_flight: submitted calls per group that may wait at once (``PHALANX_MAX_IN_FLIGHT``).
    """

    backend: str = "ray"
    inline_bytes: int = 96 * 1024
    grace_s: float = 1.0
    start_timeout: float = 300.0
    debug: bool = False
    max_in_flight: int = 1000


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
        debug=os.environ.get("PHALANX_DEBUG", "") not in ("", "0", "false"),
        max_in_flight=int(_number("PHALANX_MAX_IN_FLIGHT", Settings.max_in_flight)),
    )


def backend_name(given: str) -> str:
    """``given`` if it names a backend.

    Raises:
        DeclarationError: it does not.
    """
    if given not in BACKENDS:
        raise DeclarationError(f"backend {given!r}: expected one of {', '.join(BACKENDS)}")
    return given


def running_cluster() -> str | None:
    """The address of the cluster that the environment names (``RAY_ADDRESS``)."""
    return os.environ.get("RAY_ADDRESS") or None


def _number(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise DeclarationError(f"environment variable {name}={text!r}: expected a number") from None
