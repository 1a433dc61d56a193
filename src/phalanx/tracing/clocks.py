"""How far the clocks of other hosts are from the driver's, from what went back and forth anyway. Pure.

A message cannot be taken up before it was ready, nor an output be fetched before it was returned. With a clock that is
``offset`` ahead of the driver's, each pair of request and response therefore bounds it (Cristian, "Probabilistic
clock synchronization", 1989): ``returned - fetched <= offset <= received - encoded``. The tightest bounds of all calls
give the estimate, half their distance its uncertainty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.tracing.events import Clock, Part, Span


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request and its response say of a clock, in ns; None where one of them is not known."""

    low: int | None
    high: int | None


def bounds_of(part: Part) -> Bounds:
    """What a part of a call, with the rank's times as that host gave them, says of the host's clock."""
    low = None if part.returned is None or part.fetched is None else part.returned - part.fetched
    high = None if part.received is None or part.encoded is None else part.received - part.encoded
    return Bounds(low, high)


def estimate(host: str, bounds: Iterable[Bounds]) -> Clock | None:
    """The clock of a host; None where nothing bounds it from one of the two sides.

    Clocks that drift against each other, or are set meanwhile, make bounds that contradict each other: the middle
    is taken then as well, and the uncertainty says how far they are apart.
    """
    found = list(bounds)
    lows = [one.low for one in found if one.low is not None]
    highs = [one.high for one in found if one.high is not None]
    if not lows or not highs:
        return None
    low, high = max(lows), min(highs)
    return Clock(host, (low + high) // 2, abs(high - low) // 2 + 1)


def corrected(part: Part, offset: int) -> Part:
    """The part with its rank's times on the driver's clock."""
    if not offset:
        return part
    return replace(
        part,
        received=_less(part.received, offset),
        started=_less(part.started, offset),
        finished=_less(part.finished, offset),
        returned=_less(part.returned, offset),
    )


def corrected_span(span: Span, offset: int) -> Span:
    """The span on the driver's clock."""
    return replace(span, began=span.began - offset, ended=_less(span.ended, offset))


def _less(time: int | None, offset: int) -> int | None:
    return None if time is None else time - offset
