"""How the calls of a group are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.calls.listeners import CallInfo
from phalanx.wire.unpack import Meter


@dataclass(frozen=True)
class CallRules:
    """How the calls of a group are waited for.

    ``consequences`` is False where whoever makes the call acts on its end (a start, a repeat): the group is then
    neither broken nor closed by it, and nothing is stopped. ``verify`` has a look at the outputs before they are joined
    (debug mode). ``met`` counts the bytes that arrive. ``spare``: of a call that failed on some ranks, the others
    that do not end by themselves are interrupted and cut off their peers before they are stopped: they may be wanted.
    """

    grace_s: float
    met: Meter | None = None
    consequences: bool = True
    init: bool = False
    verify: Callable[[CallInfo, Sequence[Any]], None] | None = None
    spare: bool = False
