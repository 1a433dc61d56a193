"""The inline backend with faults by script and a clock of its own: hours of failures in milliseconds, without Ray.

Ranks run inline. For every start of a process and every call on a rank, a script decides whether it succeeds, raises,
is slow, never ends, or kills the rank. Time passes only while a caller waits.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

from phalanx.backends.backend_types import (
    DrainingNode,
    Endpoint,
    FetchFailed,
    Lost,
    NotReady,
    Ref,
    Reservation,
    ResultHandle,
    SpawnRequest,
    Waited,
)
from phalanx.backends.inline import InlineBackend, InlineRef
from phalanx.errors import DeclarationError, PlacementError
from phalanx.session.session import session
from phalanx.testing.clock import FakeClock
from phalanx.testing.faults import InjectedFault
from phalanx.wire.failure import capture
from phalanx.wire.messages import OUTPUT, Message

Event = Literal["fine", "raise", "die", "hang", "slow", "refuse"]
Script = Callable[[str, int], Event]
"""(operation, number) -> event; the operation is "reserve" (of lost blocks, again), "spawn", "setup" or "call", each
counted from 0."""

_FOREVER = float("inf")
_SLOW_S = 3.0


class Result(NamedTuple):
    """The time from which the result of a rank's call is ready, in seconds, and the rank's endpoint."""

    at: float
    endpoint: Endpoint


class ScriptedBackend(InlineBackend):
    """An inline backend whose faults a script decides; :func:`scripted` installs it."""

    def __init__(self, script: Script, clock: FakeClock | None = None) -> None:
        super().__init__({"GPU": 8.0})
        self.clock = clock or FakeClock()
        self._script = script
        self._counts = Counter[str]()
        self._results: WeakKeyDictionary[InlineRef, Result] = WeakKeyDictionary()
        #: The nodes that are reported as draining; the only node is called "inline".
        self.going: list[DrainingNode] = []

    def _next(self, what: str) -> Event:
        self._counts[what] += 1
        return self._script(what, self._counts[what] - 1)

    def draining_nodes(self, ended: bool = False) -> Sequence[DrainingNode]:
        return self.going

    def repair(self, reservation: Reservation, blocks: Collection[int], timeout: float) -> None:
        if self._next("reserve") == "refuse":
            raise PlacementError("the script says that there is no room")
        super().repair(reservation, blocks, timeout)

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        if self._next("spawn") == "refuse":
            raise PlacementError("the script says that the processes do not start")
        return super().spawn(request)

    def setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> ResultHandle:
        run = super().setup
        return ResultHandle(self._scripted("setup", endpoint, lambda: run(endpoint, data, refs), refs))

    def submit(self, endpoint: Endpoint, message: Message, returns: int = OUTPUT) -> ResultHandle:
        run, infos = super().submit, list[Ref]()

        def call() -> ResultHandle:
            result = run(endpoint, message, returns)
            infos.append(result.info)
            return result

        ref = self._scripted("call", endpoint, call, message.refs)
        if returns == OUTPUT:
            return ResultHandle(ref)
        info = infos[0] if infos else ref  # if the call fails, both references are the failure
        self._results[info] = self._results[ref]
        return ResultHandle(ref, info)

    def _scripted(
        self, what: str, endpoint: Endpoint, run: Callable[[], ResultHandle], refs: Sequence[Ref]
    ) -> InlineRef:
        event: Event = self._next(what) if endpoint.handle.lost is None else "fine"
        waits = event != "die" and endpoint.handle.lost is None
        at = max([self.clock.now(), *map(self._time_of, refs if waits else ())])
        if event == "raise":
            ref = InlineRef(failure=capture(InjectedFault(f"a {what} fails by script"), rank=-1))
        elif event == "die":
            self._take(endpoint, Lost("the script ended it", "signal SIGKILL"))
            ref = InlineRef(lost=endpoint.handle.lost)
        elif event == "hang" or at == _FOREVER:
            ref, at = InlineRef(), _FOREVER
        else:
            ref = run().value
            at += _SLOW_S if event == "slow" else 0.0
        self._results[ref] = Result(at, endpoint)
        return ref

    def _take(self, endpoint: Endpoint, lost: Lost) -> None:
        """Kill a rank: results that it has not returned yet are lost."""
        endpoint.handle.end(lost)
        for ref, result in list(self._results.items()):
            if result.endpoint is endpoint and result.at > self.clock.now():
                ref.failure, ref.lost = None, lost
                self._results[ref] = result._replace(at=self.clock.now())

    def kill(self, endpoints: Sequence[Endpoint]) -> tuple[int, ...]:
        for endpoint in endpoints:
            if endpoint.handle.lost is None:
                self._take(endpoint, Lost("the rank was stopped", "stopped", intended=True))
            endpoint.handle.runtime = None
        return ()

    def now(self) -> float:
        return self.clock.now()

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> Waited:
        times = sorted(map(self._time_of, refs))[:count]
        self._pass(max(times, default=0.0), timeout)
        now = self.clock.now()
        done = [index for index, ref in enumerate(refs) if self._time_of(ref) <= now]
        return done, [index for index, ref in enumerate(refs) if self._time_of(ref) > now]

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        failures = [self._time_of(ref) for ref in refs if ref.failure is not None or ref.lost is not None]
        self._pass(min(failures, default=max(map(self._time_of, refs), default=0.0)), timeout)
        if min(failures, default=_FOREVER) <= self.clock.now():
            raise FetchFailed
        if any(self._time_of(ref) > self.clock.now() for ref in refs):
            raise NotReady
        return super().fetch(refs)

    def _time_of(self, ref: Ref) -> float:
        """Return the time from which a reference is ready; a stored value is ready at once."""
        if ref in self._results:
            return self._results[ref].at
        return _FOREVER if ref.under_way else 0.0

    def _pass(self, until: float, timeout: float | None) -> None:
        """Advance the clock to ``until``, by at most ``timeout`` seconds."""
        limit = _FOREVER if timeout is None else self.clock.now() + timeout
        if min(until, limit) == _FOREVER:
            raise DeclarationError(
                "a caller waits without a limit for a rank that the script lets hang; expected a timeout, such as "
                "px.WorkerGroup(..., call_timeout=60.0)"
            )
        self.clock.advance_to(min(until, limit))


@contextlib.contextmanager
def scripted(script: Script, clock: FakeClock | None = None) -> Generator[ScriptedBackend]:
    """Let a script decide the faults, not of streams, of all pools of backend "inline" that are made in the block."""
    backend = ScriptedBackend(script, clock)
    with mock.patch.dict(session._backends, inline=backend):
        yield backend


def random_script(seed: int, probability: float = 0.08) -> Script:
    """Return a random script, equal for equal seeds: each start and each call fails with the given probability."""
    choice = random.Random(seed)
    failures: tuple[Event, ...] = ("raise", "die", "hang", "slow")

    def script(what: str, number: int) -> Event:
        events: tuple[Event, ...] = failures if what in ("setup", "call") else ("refuse",)
        return choice.choice(events) if choice.random() < probability else "fine"

    return script
