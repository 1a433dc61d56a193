"""A call as requested by its caller."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.calls.streams import Streaming
from phalanx.declare.spec import MethodSpec
from phalanx.dispatch.plan import CallPlan, Target


class CallRequest(NamedTuple):
    """A call as requested, before it is assigned an epoch and a call number.

    A custom collect function gets ``collector`` as the group. ``timeout`` and ``stall_report_after``, in seconds,
    override those of the group. ``describe`` asks each rank for the row count of its output next to the output, for a
    future that may be passed on by reference. ``began`` is the time when the caller began to plan the call, for a
    trace. ``chosen`` says that its rank is the least busy rank. ``streaming`` says how items of a method that yields
    are streamed.
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
