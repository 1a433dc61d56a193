"""Outputs of a rank for one call, and what is known of an output without fetching it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

#: Number of objects that a rank returns: its output, or a :class:`PartInfo` before an output that may be passed on by
#: reference.
OUTPUT, DESCRIBED = 1, 2


@dataclass(frozen=True)
class BackendRef:
    """A backend's reference within an output. It is left for the backend to pickle, which counts who holds it."""

    ref: Any


class PartInfo(NamedTuple):
    """Description of an output that is known without fetching it.

    ``settings`` are path and digest of each leaf without rows, by which outputs are compared. A leaf that is no plain
    value has no digest.
    """

    rows: int | None
    nbytes: int
    settings: tuple[tuple[str, bytes], ...] = ()


class StreamEnd(NamedTuple):
    """What a rank gives back last of a call that streams: its method is over, after so many items."""

    items: int
