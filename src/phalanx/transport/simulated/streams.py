"""The items of a simulated rank whose method yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from phalanx.transport.inline_values import InlineRef, InlineStream
from phalanx.transport.simulated.costs import Cost
from phalanx.transport.simulated.refs import SimulatedRef
from phalanx.wire.codec import encode
from phalanx.wire.outputs import StreamEnd


class SimulatedStream(InlineStream):
    """A call whose items are there together once it is over: ``ref`` tells when, and how it ended.

    ``reach`` lets the time pass until then; the first one who asks for an item waits for that.
    """

    def __init__(
        self,
        items: Iterator[Any],
        step: Callable[[Callable[[], Any]], InlineRef],
        ref: SimulatedRef,
        reach: Callable[[SimulatedRef], None],
    ) -> None:
        super().__init__(items, step)
        self._ref = ref
        self._reach = reach

    def take(self) -> InlineRef | None:
        if self._items is not None and not self._begun:
            self._reach(self._ref)
            if self._ref.failed:
                self._over()
                return self._ref.inner
        return super().take()


def stated_items(cost: Cost) -> Iterator[Any]:
    """What is stated that a method yields: the elements of a list, or one value; else nothing."""
    given: list[Any] = []
    if cost.gives:
        given = cost.returns if isinstance(cost.returns, list) else [cost.returns]
    yield from map(encode, given)
    yield StreamEnd(len(given))
