"""The hardware of a simulated cluster: nodes with cores and one link each, and where stored values lie. Pure."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from phalanx.transport.simulated.constants import Constants


@dataclass(eq=False)
class Node:
    """One machine. ``cores`` are when each of them is free; ``sends`` and ``takes`` when its link is, either way.

    ``waiting`` are processes that nobody has taken: Ray starts as many as a node has cores. ``background`` is the CPU
    that its processes take in each second without being called, which work on its cores waits for.
    """

    name: str
    cores: list[float]
    sends: float = 0.0
    takes: float = 0.0
    fails_at: float = float("inf")
    slots: int = 0
    held: int = 0
    accelerators: list[int] = field(default_factory=list[int])
    waiting: int = -1
    background: float = 0.0
    _slowed: float = 1.0

    def __post_init__(self) -> None:
        if self.waiting < 0:
            self.waiting = len(self.cores)

    def compute(self, time: float, seconds: float) -> float:
        """When work that is ready at ``time`` is done, on the core that is free first."""
        if seconds <= 0:
            return time
        done = max(time, self.cores[0]) + seconds * self._slowed
        heapq.heapreplace(self.cores, done)
        return done

    def has(self, idle_s: float) -> None:
        """Note that a process is there which takes so much CPU in each second; below 0 that it has ended."""
        self.background = max(0.0, self.background + idle_s)
        self._slowed = 1 / max(_LEFT, 1 - self.background / len(self.cores))

    def process(self, time: float, seconds: float) -> float:
        """When a process that is asked for at ``time`` is there: one that waits, or a new one."""
        if self.waiting:
            self.waiting -= 1
            return time
        return self.compute(time, seconds)


def make_nodes(
    count: int, slots: int, cores: int, seed: int, hours_between_failures: float | None
) -> list[Node]:
    """Nodes of one kind, and when each fails: decided by the seed, after an exponential time."""
    chance = random.Random(seed)
    made: list[Node] = []
    for number in range(count):
        node = Node(f"node-{number}", [0.0] * cores, slots=slots)
        node.accelerators = list(range(slots))
        if hours_between_failures is not None:
            node.fails_at = chance.expovariate(1 / (3600.0 * hours_between_failures))
        made.append(node)
    return made


class Wires:
    """Where values lie, and how they get to other nodes: from whichever node that has one can send first.

    So a value for many nodes spreads as a tree by itself, as Ray's object store does it.
    """

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._holders: dict[int, list[tuple[float, int, Node]]] = {}
        self._has: dict[int, dict[Node, float]] = {}
        self.moved_bytes = 0
        self._count = 0

    def store(self, key: int, node: Node, time: float) -> None:
        """Note that a value lies on a node from then on."""
        self._has.setdefault(key, {})[node] = time
        self._count += 1
        heapq.heappush(self._holders.setdefault(key, []), (time, self._count, node))

    def forget(self, key: int) -> None:
        """Nobody needs it any more."""
        self._has.pop(key, None)
        self._holders.pop(key, None)

    def arrive(self, key: int, nbytes: int, node: Node, time: float) -> float:
        """When a value is on a node that needs it at ``time``; it is sent once to each node."""
        here = self._has.get(key)
        if here is None:
            return time
        if node in here:
            return max(time, here[node])
        holders = self._holders[key]
        since, _, source = heapq.heappop(holders)
        begin = max(time, since, source.sends, node.takes)
        done = begin + self._constants.latency_s + nbytes / self._constants.network_bytes_per_s
        source.sends = node.takes = done
        self.moved_bytes += nbytes
        here[node] = done
        self._count += 2
        heapq.heappush(holders, (done, self._count, source))
        heapq.heappush(holders, (done, self._count + 1, node))
        return done

    def sent(self, source: Node, target: Node, nbytes: int, time: float) -> float:
        """When so many bytes of a message are there."""
        if source is target:
            return time
        if nbytes < _SMALL:
            return time + self._constants.latency_s
        begin = max(time, source.sends, target.takes)
        done = begin + self._constants.latency_s + nbytes / self._constants.network_bytes_per_s
        source.sends = target.takes = done
        self.moved_bytes += nbytes
        return done


_LEFT = 0.05  # of a node's cores at least for calls
_SMALL = 64 << 10  # bytes; smaller messages interleave with whatever the link is at
