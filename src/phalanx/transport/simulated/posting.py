"""A message for one simulated rank, that the driver or a relay sends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from phalanx.tracing.journal import IN, OUT, RUN
from phalanx.transport.inline import InlineRank
from phalanx.transport.inline_values import InlineRef
from phalanx.transport.simulated.machines import Node
from phalanx.transport.simulated.processes import Process, Value, Work, World
from phalanx.transport.simulated.rank import StandIn
from phalanx.transport.simulated.refs import SimulatedRef
from phalanx.transport.timed import TimedRef


class SimulatedRank(InlineRank):
    """A rank of which only the times are there."""

    def __init__(self, process: Process, stand_in: StandIn) -> None:
        super().__init__(None)
        self.process = process
        self.stand_in = stand_in
        self.rank = -1
        self.under_way: dict[int, tuple[Work, TimedRef]] = {}


@dataclass(eq=False, slots=True)
class Posting:
    """What a rank is sent, and what it will give back; without work where the rank was gone before."""

    rank: SimulatedRank
    ref: SimulatedRef
    message_bytes: int
    work: Work | None

    @property
    def out(self) -> Value:
        """Its output, as the model knows it."""
        return self.ref.value

    def post(self, world: World, source: Node, time: float) -> Any:
        """Send it from a node, where its answer goes to."""
        work, process = self.work, self.rank.process
        if work is None:
            return self._refused(time)
        work.to = source
        there = world.wires.sent(source, process.node, self.message_bytes, time)
        world.events.at(there, lambda at: process.arrive(work, at))
        return None

    def _refused(self, time: float) -> list[TimedRef]:
        self.ref.at = time
        self.out.arrive(time)
        return [self.ref]


class Journals:
    """What ranks would have written of calls that are traced, by path. ``began_ns`` is when the clock was at 0."""

    def __init__(self, began_ns: int) -> None:
        self._began_ns = began_ns
        self._written: dict[str, bytearray] = {}

    def note(self, trace: tuple[str, int], work: Work, nbytes: int, inner: InlineRef) -> None:
        """One call that has ended, by the path of its rank's journal and its number there."""
        path, number = trace
        at = [
            self._began_ns + int(t * 1e9) for t in (work.received, work.started, work.finished, work.returned)
        ]
        error = "null" if inner.failure is None else json.dumps("SimulatedFault")
        journal = self._written.setdefault(path, bytearray())
        journal += (
            f'["{IN}",{number},{at[0]}]\n["{RUN}",{number},{at[1]},{nbytes}]\n'
            f'["{OUT}",{number},{at[2]},{at[3]},{work.out.nbytes},{error}]\n'
        ).encode()

    def read(self, path: str, offset: int, limit: int) -> bytes | None:
        """A part of one; None if there is none at that path."""
        if path not in self._written:
            return None
        return bytes(self._written[path][offset : offset + limit])
