"""The processes of a simulated cluster: each takes its calls in order, and what they need from its node. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.transport.simulated.constants import Constants
from phalanx.transport.simulated.events import Events
from phalanx.transport.simulated.machines import Node, Wires


@dataclass(eq=False, slots=True)
class Value:
    """Something that is stored, or still comes; ``waiting`` are called once it is there."""

    nbytes: int = 0
    at: float = float("inf")
    waiting: list[Callable[[float], Any]] = field(default_factory=list[Callable[[float], Any]])

    def arrive(self, time: float) -> None:
        """It is there from now on."""
        self.at = time
        waiting, self.waiting = self.waiting, []
        for act in waiting:
            act(time)


@dataclass(eq=False, slots=True)
class Work:
    """One call on one process: what it needs, how long it takes, what it gives. The times are filled in as it goes.

    ``cpu`` is the part of it that needs a core of the node; ``seconds`` is the method's own, on its accelerator.
    ``to`` is the node that its answer goes to.
    """

    seconds: float
    cpu: float
    message_bytes: int
    needs: Sequence[Value]
    out: Value
    done: Callable[[Work, float], Any]
    received: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    returned: float = 0.0
    over: bool = False
    to: Node | None = None


class Process:
    """One worker process: ``width`` calls at a time, begun in the order in which they came."""

    __slots__ = ("_ended", "_queue", "_running", "_world", "node", "since", "width")

    def __init__(self, world: World, node: Node, since: float, width: int = 1) -> None:
        self._world = world
        self.node = node
        self.width = width
        self.since = since
        self._queue: deque[Work] = deque()
        self._running: list[Work] = []
        self._ended = False
        node.has(world.constants.idle_s)

    def arrive(self, work: Work, time: float) -> None:
        """Take a call up, once it is its turn."""
        if self._ended:
            return
        self._queue.append(work)
        self._go_on(time)

    def end(self) -> list[Work]:
        """The process is gone; the calls that it had not given an answer to."""
        if not self._ended:
            self.node.has(-self._world.constants.idle_s)
        self._ended = True
        left = [*self._running, *self._queue]
        self._running.clear()
        self._queue.clear()
        return left

    def drop(self, work: Work, time: float) -> bool:
        """Leave out a call, or interrupt it; whether it had not begun."""
        work.over = True
        if work in self._queue:
            self._queue.remove(work)
            return True
        if work in self._running:
            self._running.remove(work)
            self._go_on(time)
        return False

    def _go_on(self, time: float) -> None:
        while self._queue and len(self._running) < self.width and not self._ended:
            work = self._queue[0]
            missing = next((value for value in work.needs if value.at > time), None)
            if missing is not None:
                missing.waiting.append(self._go_on)
                return
            self._queue.popleft()
            self._running.append(work)
            self._begin(work, time)

    def _begin(self, work: Work, time: float) -> None:
        world, node, constants = self._world, self.node, self._world.constants
        work.received = time
        there = time
        busy = work.cpu / 2 + work.message_bytes / constants.message_bytes_per_s
        for value in work.needs:
            if value.nbytes:
                there = max(there, world.wires.arrive(id(value), value.nbytes, node, time))
                busy += constants.get_s + value.nbytes / constants.copy_bytes_per_s
        work.started = node.compute(there, busy)
        work.finished = work.started + work.seconds
        world.events.at(work.finished, lambda at: self._finish(work, at))

    def _finish(self, work: Work, time: float) -> Any:
        if self._ended or work.over:
            return None
        world, constants = self._world, self._world.constants
        speed = (
            constants.message_bytes_per_s if work.out.nbytes < INLINE_BYTES else constants.store_bytes_per_s
        )
        work.returned = self.node.compute(time, work.cpu / 2 + work.out.nbytes / speed)
        world.events.at(work.returned, lambda at: self._returned(work, at))
        return None

    def _returned(self, work: Work, time: float) -> Any:
        if self._ended or work.over:
            return None
        self._running.remove(work)
        world = self._world
        if work.out.nbytes >= INLINE_BYTES:
            world.wires.store(id(work.out), self.node, time)
        world.events.at(time + world.latency(self.node, work.to), lambda at: work.done(work, at))
        self._go_on(time)
        return None


INLINE_BYTES = 100 << 10
"""Smaller outputs come back inside the answer, as Ray does it."""


class World:
    """What all processes share: the events, the wires, and the node of the driver."""

    def __init__(self, constants: Constants, driver: Node) -> None:
        self.constants = constants
        self.events = Events()
        self.wires = Wires(constants)
        self.driver = driver

    def latency(self, source: Node, target: Node | None) -> float:
        """How long a short answer travels; to the driver where nothing is said."""
        return 0.0 if source is (target or self.driver) else self.constants.latency_s
