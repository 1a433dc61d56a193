"""A script on a cluster that is not there: its groups are simulated, and time is that of the model."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.runtime.groups.relays import least_for
from phalanx.runtime.session import connection as cluster
from phalanx.runtime.tools.trace import Tracer
from phalanx.tracing.events import Trace
from phalanx.transport.simulated.costs import Costs
from phalanx.transport.simulated.model import Model
from phalanx.transport.simulated.relays import SimulatedRelays
from phalanx.transport.simulated.transport import SimulatedTransport

_YOUNG = 100_000
Shape = tuple[int, int]
"""Nodes, and ranks on each."""


@dataclass
class Simulation:
    """What is simulated, and once it is over what came of it. ``pools`` are shapes for pools by their name.

    ``relay_from`` is from how many ranks on calls go through relays; None: as ``PHALANX_RELAY_FROM`` says.
    """

    model: Model
    costs: Costs = field(default_factory=Costs)
    pools: Mapping[str, Shape] = field(default_factory=dict[str, Shape])
    relay_from: int | None = None
    trace: Trace | None = None
    made: list[str] = field(default_factory=list[str])
    named: set[str] = field(default_factory=set[str])

    def reshaped(self, name: str | None, asked: tuple[int, ...]) -> tuple[int, ...]:
        """The blocks that a pool of the script gets."""
        nodes, ranks = self.pools.get(name or "", (self.model.nodes, self.model.ranks_per_node))
        self.named.add(name or "")
        given = (ranks,) * nodes if self.model.fill or name in self.pools else asked
        self.made.append(f"{name or 'pool'}: {list(asked)} in the script, here {_text(given)}")
        return given

    @contextlib.contextmanager
    def running(self, title: str = "") -> Generator[SimulatedTransport]:
        """Whatever is done meanwhile is done on the simulated cluster, and traced.

        ``time.time``, ``time.perf_counter`` and ``time.sleep`` are those of the simulation meanwhile.
        """
        transport = SimulatedTransport(self.model, self.costs, self.relay_from)
        with (
            _collecting_seldom(),
            _clocks_of(transport),
            cluster.standing_in(transport, self.reshaped),
        ):
            tracer = Tracer(title=title).start()
            try:
                yield transport
            finally:
                found = tracer.events
                tracer.stop()
                self.trace = replace(found, host="driver", notes=(*found.notes, *self.notes(transport)))

    def notes(self, transport: SimulatedTransport) -> tuple[str, ...]:
        """What the report rests on."""
        model, unknown = self.model, sorted(self.costs.unknown)
        lines = [
            f"Simulated: {model.nodes} nodes, {model.ranks_per_node} ranks and {model.cores} cores on each; "
            f"{transport.clock.now():.6g} s, {transport.messages:,} messages of {transport.message_bytes:,} bytes, "
            f"{transport.world.wires.moved_bytes:,} bytes between nodes.",
            *ways(transport),
            "The driver's own code between calls takes no time here.",
            *self.made,
        ]
        if unknown and model.run == "none":
            lines.append(
                f"Nothing is stated of {', '.join(unknown)}: they took 0 s and returned None. "
                "State them with --cost or --costs, or run them on one rank with --run one."
            )
        elif unknown:
            ranks = "one rank, whose time counts for all" if model.run == "one" else "each rank"
            lines.append(f"Run in this process on {ranks}: {', '.join(unknown)}.")
        if self.costs.unused:
            lines.append(f"Costs of methods that nobody called: {', '.join(self.costs.unused)}.")
        if unused := sorted(self.pools.keys() - self.named):
            lines.append(f"Shapes of pools that were not made: {', '.join(unused)}.")
        return tuple(lines)


def ways(transport: SimulatedTransport) -> tuple[str, ...]:
    """Which way the calls of the script's groups were assumed to go: a line for each shape of a tree of relays."""
    least = least_for(transport)
    by_shape: dict[str, list[SimulatedRelays]] = {}
    for relays in transport.made_relays:
        tree = relays.tree
        ranks = sum(len(tree.relays[head].ranks) for head in tree.head_indices)
        shape = (
            f"{ranks:,} ranks through {len(tree.relays):,} relays, {tree.heads} of them called by the driver"
        )
        by_shape.setdefault(f"{shape}, {tree.hops} hops", []).append(relays)
    if not by_shape:
        why = f"no group has {least} ranks or more" if least else "no group has relays"
        return (f"Calls went from the driver to each rank: {why} (--relays, PHALANX_RELAY_FROM: {least}).",)
    sent = [sum(relays.counted.messages for relays in alike) for alike in by_shape.values()]
    return tuple(
        f"Calls went to {shape}, in {messages:,} messages (--relays, PHALANX_RELAY_FROM: {least})."
        for shape, messages in zip(by_shape, sent, strict=True)
    )


def _text(blocks: tuple[int, ...]) -> str:
    if len(set(blocks)) == 1:
        return f"{len(blocks)} x {blocks[0]}"
    return str(list(blocks))


@contextlib.contextmanager
def _collecting_seldom() -> Generator[None]:
    """Look for garbage seldom: thousands of ranks and messages live long, and half the time would go into that."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _YOUNG), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _clocks_of(transport: SimulatedTransport) -> Generator[None]:
    """Let the clocks that scripts read be those of the simulation."""

    def slept(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return sleep(seconds)  # of whoever waits for something that is real
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        transport.sleep(seconds)
        return None

    sleep, began = time.sleep, transport.wall_ns()
    changed: dict[str, Callable[..., Any]] = {
        "time": lambda: transport.wall_ns() / 1e9,
        "time_ns": transport.wall_ns,
        "perf_counter": lambda: (transport.wall_ns() - began) / 1e9,
        "perf_counter_ns": lambda: transport.wall_ns() - began,
        "sleep": slept,
    }
    before = {name: getattr(time, name) for name in changed}
    for name, function in changed.items():
        setattr(time, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(time, name, function)
