"""The one worker of a simulated group that is there: what it gives stands for what every rank gives."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from phalanx.transport.inline_values import InlineRef
from phalanx.transport.values import Endpoint, Ref, SpawnRequest, Ticket
from phalanx.wire.codec import decode, encode
from phalanx.wire.messages import RankCall, RankSetup, is_library_call
from phalanx.wire.outputs import HALVED, OUTPUT, PartInfo


class Runs(Protocol):
    """Runs calls in this process, as the inline backend does."""

    def run_setup(self, endpoint: Endpoint, data: bytes, refs: Sequence[Ref]) -> Ticket: ...
    def run_call(
        self, endpoint: Endpoint, role: str, method: str, data: bytes, refs: Sequence[Ref], returns: int
    ) -> Ticket: ...


@dataclass
class Answer:
    """What a call gave on the stand-in: its references, and the real seconds that it took."""

    ticket: Ticket
    seconds: float = 0.0
    real: bool = False


class StandIn:
    """Of one group. ``runs`` says whether the methods are really run; else only what the library itself asks is.

    Calls of one number whose messages are as long as each other are run once.
    """

    def __init__(self, endpoint: Endpoint, request: SpawnRequest, runs: bool) -> None:
        self._endpoint = endpoint
        self._runs = runs
        self.class_name = request.class_name
        self.classes: dict[str, str] = {}
        self.setup_seconds: float | None = None
        self.made: Any = None
        self._last: tuple[Any, ...] = ()
        self._answer = Answer(Ticket(InlineRef()))

    def setup(self, backend: Runs, data: bytes, refs: Sequence[Ref]) -> Answer:
        """Become rank 0: with the users' objects where methods are run, else with none."""
        setup, body = RankSetup.unpack(data)
        roles = decode(body) if body is not None else refs[-1].get()
        self.classes = {role: made[0].__name__ for role, made in roles.items()}
        quiet = replace(setup, trace="")  # its journal is the simulation's
        own = quiet.pack(body if self._runs else encode({}).to_bytes())
        begun = time.monotonic()
        ticket = backend.run_setup(self._endpoint, own, refs)
        return Answer(ticket, time.monotonic() - begun, self._runs)

    def call(
        self,
        backend: Runs,
        endpoint: Endpoint,
        role: str,
        method: str,
        call: RankCall | None,
        data: bytes,
        refs: Sequence[Ref],
        returns: int,
        given: Mapping[str, Any] | None,
    ) -> Answer:
        """What a call gives; ``given`` is what is stated of it, as ``{"value": ...}``; ``call`` None is a bare one."""
        of_library = is_library_call(method)
        number = call.call if call is not None else endpoint.bare_calls
        key = (number, role, method, len(data))
        if key == self._last:
            return self._answer
        real = of_library or (self._runs and given is None)
        if real:
            begun = time.monotonic()
            if call is not None and call.trace:
                data = call._replace(trace="").pack()
            ticket = backend.run_call(self._endpoint, role, method, data, refs, returns)
            self._answer = Answer(ticket, time.monotonic() - begun, not of_library)
        else:
            self._answer = Answer(_stated(None if given is None else given["value"], returns))
        self._last = key
        return self._answer

    @property
    def endpoint(self) -> Endpoint:
        """The process that it is run in, as far as the inline backend knows."""
        return self._endpoint


def _stated(value: Any, returns: int) -> Ticket:
    ref = InlineRef(value if value is None else encode(value))
    if returns == OUTPUT:
        return Ticket(ref)
    info = InlineRef(PartInfo(None, 0))
    return Ticket(ref, info, InlineRef(None) if returns == HALVED else None)
