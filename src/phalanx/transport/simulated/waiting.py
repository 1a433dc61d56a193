"""Waiting on the clock of a simulated cluster: time passes as its events happen."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.processes import World
from phalanx.transport.simulated.refs import has_failed, value_of
from phalanx.transport.timed import FOR_EVER, TimedCalls, TimedRef, at_of
from phalanx.transport.values import Ref


class EventCalls(TimedCalls):
    """The driver of a backend whose time is that of a queue of events."""

    model: Model
    world: World
    _lock: threading.RLock  # pyright: ignore

    def spend(self, seconds: float) -> float:
        """Let the driver be busy; the time when it is done."""
        now = self.clock.now()
        self.world.events.until(now)
        return self.clock.advance_to(self.world.driver.compute(now, seconds))

    def _reach(self, refs: Sequence[Ref], count: int, limit: float, *, stop_at_failure: bool) -> None:
        with self._lock:
            events, clock = self.world.events, self.clock
            events.until(clock.now())
            waited = {id(ref) for ref in refs if isinstance(ref, TimedRef) and ref.at == FOR_EVER}
            left = count - (len(refs) - len(waited))
            if stop_at_failure and any(has_failed(ref) for ref in refs if at_of(ref) != FOR_EVER):
                return
            while left > 0 and waited:
                if events.next > limit or events.next == FOR_EVER:
                    self._pass(limit)
                    return
                for ended in events.step() or ():
                    if id(ended) in waited:
                        waited.discard(id(ended))
                        left -= 1
                        clock.advance_to(ended.at)
                        if stop_at_failure and ended.failed:
                            return

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        found = super().fetch(refs, timeout)
        constants, world = self.model.constants, self.world
        with self._lock:
            nbytes = 0
            until = self.clock.now()
            for value in map(value_of, refs):
                if value is not None and value.nbytes:
                    nbytes += value.nbytes
                    until = max(
                        until, world.wires.arrive(id(value), value.nbytes, world.driver, self.clock.now())
                    )
            world.events.until(until)
            self.clock.advance_to(until)
            per_rank = constants.take_s * len(refs)
            self.spend(constants.call_s + per_rank + nbytes / constants.copy_bytes_per_s)
        return found

    def fetch_batches(self, refs: Sequence[Ref], timeout: float | None) -> list[Any]:
        """What relays gave, at the price of that."""
        found = super().fetch(refs, timeout)
        constants = self.model.constants
        nbytes = sum(value.nbytes for value in map(value_of, refs) if value is not None)
        with self._lock:
            self.spend(
                constants.call_s + constants.take_s * len(refs) + nbytes / constants.message_bytes_per_s
            )
        return found
