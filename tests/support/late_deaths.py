"""A driver that hears of the deaths of some ranks later than of what follows from them, as of a lost node on Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import phalanx as px
from phalanx.backends.backend_types import Endpoint, Ref, Ticket


class Untold:
    """What is held back: the ends of calls of some ranks, which are ``refs``, and that their processes are gone."""

    def __init__(self, transport: Any, endpoints: Sequence[Endpoint]) -> None:
        self.refs: list[Ref] = []
        self._submit, self._wait, self._dead_of = transport.submit, transport.wait, transport.dead_of
        self._endpoints = endpoints

    def submit(self, endpoint: Endpoint, *args: Any) -> Ticket:
        ticket = self._submit(endpoint, *args)
        if endpoint in self._endpoints:
            self.refs.append(ticket.value)
        return ticket

    def wait(self, refs: Sequence[Ref], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        heard = [index for index, ref in enumerate(refs) if ref not in self.refs]
        if not heard and timeout is None:
            return self._wait(refs, count, None)  # nobody else tells anything
        if not heard:
            return [], [*range(len(refs))]
        ended, _ = self._wait([refs[index] for index in heard], min(count, len(heard)), timeout)
        done = [heard[index] for index in ended]
        return done, [index for index in range(len(refs)) if index not in done]

    def dead_of(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [p for p in self._dead_of(endpoints) if endpoints[p] not in self._endpoints]


@contextlib.contextmanager
def untold(group: px.WorkerGroup, ranks: Sequence[int]) -> Generator[Untold]:
    """The time in which the driver is not told of the deaths of those ranks; their peers' errors come as ever."""
    transport: Any = group.core.backend
    held = Untold(transport, [group.core.endpoints[rank] for rank in ranks])
    with contextlib.ExitStack() as stack:
        for name in ("submit", "wait", "dead_of"):
            setattr(transport, name, getattr(held, name))
            stack.callback(delattr, transport, name)
        yield held
