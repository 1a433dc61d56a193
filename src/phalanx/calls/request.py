"""One call as whoever makes it wants it."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.calls.streams import Streaming
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Target


class CallRequest(NamedTuple):
    """One call as whoever makes it wants it, before it is of an epoch and has a number.

    ``collector`` is what a custom collect function gets as the group. ``timeout`` and ``stall_report_after`` are those
    of the call, in seconds, where it has its own. ``describe`` asks each rank for the row count of its output beside
    the output, for a future that may be handed on by reference. ``began`` is when the caller began to plan it, for a
    trace. ``chosen`` says that its rank is the least busy one. ``streaming`` says how items of a method that yields are
    to come one by one.
    """

    plan: CallPlan
    spec: MethodSpec
    role: str
    collector: Target | None = None
    timeout: float | None = None
    stall_report_after: float | None = None
    describe: bool = False
    began: int = 0
    chosen: bool = False
    streaming: Streaming | None = None
