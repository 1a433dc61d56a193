"""The inline backend with faults by script and a clock of its own: hours of failures in milliseconds, without Ray.

Ranks run as they do inline; a script decides of every process that is started and every call that reaches a rank
whether it goes well, raises, takes its time, never ends, or takes the rank with it. Time passes only where
somebody waits.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Sequence
from typing import Literal

from phalanx.backends.backend_types import (
    DrainingNode,
    Endpoint,
    Lost,
    ProcessStatus,
    Ref,
    Reservation,
    SpawnRequest,
    Ticket,
)
from phalanx.backends.inline import InlineBackend, InlineRef
from phalanx.errors import PlacementError
from phalanx.session import session as cluster
from phalanx.testing.clock import FakeClock
from phalanx.testing.timed import FOR_EVER, TimedCalls, TimedRef, plain
from phalanx.wire.failure import capture
from phalanx.wire.messages import OUTPUT, Message

Event = Literal["fine", "raise", "die", "hang", "slow", "refuse"]
Script = Callable[[str, int], Event]
"""(what, number) -> event; what is "reserve", "spawn", "setup" or "call", counted from 0 each."""


class ScriptedFault(RuntimeError):
    """Error of a rank where the script says "raise"."""


class ScriptedBackend(TimedCalls, InlineBackend):
    """An inline backend under a script; :func:`scripted` puts it in place."""

    def __init__(self, script: Script, clock: FakeClock | None = None, slow_s: float = 3.0) -> None:
        super().__init__({"GPU": 8.0})
        self.clock = clock or FakeClock()
        self._script = script
        self._slow_s = slow_s
        self._counts: dict[str, int] = {}
        self._open: list[TimedRef] = []
        #: The nodes that it says will be taken away; its one node is called "inline".
        self.going: list[DrainingNode] = []

    def _next(self, what: str) -> Event:
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        return self._script(what, number)

    def going_nodes(self) -> Sequence[DrainingNode]:
        return self.going

    def repair(self, reservation: Reservation, timeout: float) -> frozenset[int]:
        if self._next("reserve") == "refuse":
            raise PlacementError("the script says that there is no room")
        return super().repair(reservation, timeout)

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        if self._next("spawn") == "refuse":
            raise PlacementError("the script says that the processes do not start")
        return super().spawn(request)

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket:
        inner = plain(refs)
        return Ticket(
            self._scripted(
                "setup", endpoint, lambda: super(ScriptedBackend, self).setup(endpoint, data, inner)
            )
        )

    def submit(self, endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> Ticket:
        inner = message._replace(refs=tuple(plain(message.refs)))

        def run() -> Ticket:
            return super(ScriptedBackend, self).submit(endpoint, inner, OUTPUT)

        return Ticket(self._scripted("call", endpoint, run))

    def _scripted(self, what: str, endpoint: Endpoint, run: Callable[[], Ticket]) -> TimedRef:
        event: Event = self._next(what) if endpoint.handle.alive else "fine"
        at = self.clock.now()
        if event == "raise":
            inner = InlineRef(failure=capture(ScriptedFault(f"a {what} fails by script"), rank=-1))
        elif event == "die":
            self._take(endpoint, Lost("the script ended it", "signal SIGKILL"))
            inner = InlineRef(lost=endpoint.handle.lost)
        elif event == "hang":
            inner, at = InlineRef(), FOR_EVER
        else:
            inner = run().value
            at += self._slow_s if event == "slow" else 0.0
        ref = TimedRef(inner, at, endpoint)
        self._open.append(ref)
        return ref

    def _take(self, endpoint: Endpoint, lost: Lost) -> None:
        """End a rank: what it has not given back by now is lost."""
        endpoint.handle.alive = False
        endpoint.handle.lost = lost
        for ref in self._open:
            if ref.endpoint is endpoint and ref.at > self.clock.now():
                ref.inner, ref.at = InlineRef(lost=lost), self.clock.now()

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        for endpoint in endpoints:
            if endpoint.handle.alive:
                self._take(endpoint, Lost("the rank was stopped", "stopped", intended=True))
        self._open = [ref for ref in self._open if ref.at > self.clock.now()]
        return super().kill([endpoint for endpoint in endpoints if endpoint.handle.lost is None])

    def sights(self, endpoints: Sequence[Endpoint], stacks: bool) -> list[ProcessStatus]:
        return [ProcessStatus(one.handle.alive, gone=not one.handle.alive) for one in endpoints]


@contextlib.contextmanager
def scripted(script: Script, clock: FakeClock | None = None) -> Generator[ScriptedBackend]:
    """Let the pools of backend "inline" that are made meanwhile be under a script."""
    backend = ScriptedBackend(script, clock)
    with cluster.replaced_backend("inline", backend):
        yield backend


def random_script(seed: int, probability: float = 0.08) -> Script:
    """A script that a seed decides: each start and each call fails in some way with the given probability."""
    choice = random.Random(seed)
    events: dict[str, tuple[Event, ...]] = {
        "reserve": ("refuse",),
        "spawn": ("refuse",),
        "setup": ("raise", "die", "hang", "slow"),
        "call": ("raise", "die", "hang", "slow"),
    }

    def script(what: str, number: int) -> Event:
        return choice.choice(events[what]) if choice.random() < probability else "fine"

    return script
