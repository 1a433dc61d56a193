"""A relay: an actor between a driver and ranks of a large group, which sends, waits and collects for it.

It never decodes what ranks return. A call is sent on as soon as those before it were, on the actor's loop, so that
calls reach each rank in one order; a thread waits for what comes back. Ray does not list the calls that relays make:
the cluster has one process that would keep a record of each, and there are thousands of them in a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray import exceptions as rayx
from ray._private import worker as ray_worker

from phalanx.transport.ray.sending import submit
from phalanx.transport.relaying import Part
from phalanx.transport.values import Endpoint, Ticket
from phalanx.wire.arrival import decoding
from phalanx.wire.outputs import HALVED
from phalanx.wire.relayed import Batch, Envelope, Gone, Shares, batch_of, merged, packed_output, part_of

_MOST_WAITS = 4096
_COMES_WITHIN_S = 5.0


class SomeFailed(Exception):
    """Raised to whoever waits for a batch: not all ranks returned. What became of each is asked for by itself."""


@dataclass
class Below:
    """What a relay has below it: ranks, or other relays, each with its name and the ranks that it reaches.

    ``niceness`` is that of the driver, for which it sends.
    """

    name: str
    ranks: tuple[int, ...]
    endpoints: list[Endpoint]
    relays: list[tuple[str, Any, tuple[int, ...]]]
    niceness: int = 0


@dataclass
class _ToRanks:
    """A call on its way at ranks."""

    tickets: list[Ticket]
    halved: bool

    def collect(self) -> Batch:
        refs = [ticket.value for ticket in self.tickets]
        if self.halved:
            refs += [ticket.rest for ticket in self.tickets]
        return batch_of(_outputs(refs), refs)

    def parts(self) -> list[Part]:
        ended = _ended([ticket.value for ticket in self.tickets])
        return [Part(ticket, ticket.value in ended) for ticket in self.tickets]


@dataclass
class _ToRelays:
    """A call on its way at relays: each one's name, handle, positions of its ranks, and reference to its batch.

    ``through`` are their places and handles.
    """

    serial: int
    count: int
    halved: bool
    sent: list[tuple[str, Any, Sequence[int], Any]]
    through: list[tuple[int, Any]]

    def collect(self) -> Batch:
        try:
            batches = [Batch.unpack(packed) for packed in ray.get([ref for _, _, _, ref in self.sent])]
        except rayx.RayError as error:
            raise SomeFailed from error
        both = 2 if self.halved else 1
        places = [[*at, *(self.count + p for p in at)] if self.halved else at for _, _, at, _ in self.sent]
        return merged(self.count * both, list(zip(places, batches, strict=True)))

    def parts(self) -> list[Part]:
        asked = [handle.parts.remote(self.serial) for _, handle, _, _ in self.sent]
        found: list[Part] = [Part(None)] * self.count
        for (name, _, positions, _), ref in zip(self.sent, asked, strict=True):
            try:
                some = ray.get(ref)
            except rayx.RayError as error:
                some = [Part(None, True, Gone(name, first_line(error)))] * len(positions)
            for position, part in zip(positions, some, strict=True):
                found[position] = part
        return found


class Relay:
    """The actor; it is asynchronous."""

    def __init__(self, below: Below) -> None:
        self._below = below
        self._shares = Shares([ranks for _, _, ranks in below.relays]) if below.relays else None
        self._at = {rank: index for index, rank in enumerate(below.ranks)}
        self._next = 0
        self._sequences = [0] * len(below.relays)
        self._turns: dict[int, asyncio.Future[None]] = {}
        self._calls: dict[int, _ToRanks | _ToRelays] = {}
        self._over: list[list[int]] = [[] for _ in below.relays]  # calls that those below are still to forget
        self._threads = ThreadPoolExecutor(_MOST_WAITS, "phalanx-relay")
        # These threads wait, and not the loop, as Ray would warn.
        ray_worker.blocking_get_inside_async_warned = True
        # The driver hears of each failure by the batch; what it does not ask for is no affair of the relay's log.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        _be_as_nice_as(below.niceness)

    async def whereabouts(self) -> tuple[str, int]:
        """The host and the process id."""
        return socket.gethostname(), os.getpid()

    async def forward(self, sequence: int, data: bytes, refs: Sequence[Any] = ()) -> bytes | Batch:
        """Send a call on, after those before it; its batch, packed.

        Raises:
            SomeFailed: as soon as a rank, or a relay below, has failed.
        """
        await self._turn(sequence)
        try:
            envelope = Envelope.unpack(data)
            self._forget(envelope.over)
            call = self._calls[envelope.serial] = self._send(envelope, refs)
            self._have_forgotten()  # by those to which this one did not go
        finally:
            self._begin_next()
        batch = await asyncio.get_running_loop().run_in_executor(self._threads, call.collect)
        return batch.pack()

    async def forget(self, sequence: int, serials: Sequence[int]) -> None:
        """Keep nothing of these calls any more."""
        await self._turn(sequence)
        try:
            self._forget(serials)
            self._have_forgotten()
        finally:
            self._begin_next()

    def _forget(self, serials: Sequence[int]) -> None:
        for serial in serials:
            self._calls.pop(serial, None)
        for over in self._over:
            over += serials

    def _have_forgotten(self) -> None:
        for index, (_, handle, _) in enumerate(self._below.relays):
            if self._over[index]:
                handle.forget.remote(self._sequences[index], self._over[index])
                self._sequences[index] += 1
                self._over[index] = []

    async def ended(self, sequence: int, serial: int) -> None:
        """Return once a call that was forwarded before has ended on all ranks, whatever came of it."""
        await self._turn(sequence)
        try:
            call = self._calls.get(serial)
            if isinstance(call, _ToRanks):
                refs = [ticket.value for ticket in call.tickets]
            else:
                refs = [] if call is None else self._end_below(call)
        finally:
            self._begin_next()
        if refs:
            await asyncio.get_running_loop().run_in_executor(self._threads, _wait_for, refs)

    def _end_below(self, call: _ToRelays) -> list[Any]:
        asked: list[Any] = []
        for index, handle in call.through:
            asked.append(handle.ended.remote(self._sequences[index], call.serial))
            self._sequences[index] += 1
        return asked

    async def parts(self, serial: int) -> list[Part]:
        """What is known of a call's part on each of its ranks. It has been sent before, by whoever asks."""
        until = time.monotonic() + _COMES_WITHIN_S
        while serial not in self._calls and time.monotonic() < until:  # its turn has not come
            await asyncio.sleep(0.001)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._calls[serial].parts)

    async def _turn(self, sequence: int) -> None:
        if sequence != self._next:  # Ray promises no order for asynchronous actors
            self._turns[sequence] = mine = asyncio.get_running_loop().create_future()
            await mine

    def _begin_next(self) -> None:
        self._next += 1
        waiting = self._turns.pop(self._next, None)
        if waiting is not None:
            waiting.set_result(None)

    def _send(self, envelope: Envelope, refs: Sequence[Any]) -> _ToRanks | _ToRelays:
        if self._shares is None:
            return self._to_ranks(envelope, refs)
        count = self._shares.count if envelope.ranks is None else len(envelope.ranks)
        sent: list[tuple[str, Any, Sequence[int], Any]] = []
        through: list[tuple[int, Any]] = []
        for index, positions, ranks in self._shares.of(envelope.ranks):
            part, used = part_of(envelope, positions if count > len(positions) else None, ranks)
            part, self._over[index] = part._replace(over=self._over[index]), []
            name, handle, _ = self._below.relays[index]
            args = (part.pack(), [refs[place] for place in used]) if used else (part.pack(),)
            sent.append((name, handle, positions, handle.forward.remote(self._sequences[index], *args)))
            through.append((index, handle))
            self._sequences[index] += 1
        return _ToRelays(envelope.serial, count, envelope.returns == HALVED, sent, through)

    def _to_ranks(self, envelope: Envelope, refs: Sequence[Any]) -> _ToRanks:
        endpoints = self._below.endpoints
        if envelope.ranks is not None:
            endpoints = [endpoints[self._at[rank]] for rank in envelope.ranks]
        role, method, returns = envelope.role, envelope.method, envelope.returns
        messages = [(data, [refs[place] for place in places]) for data, places in envelope.messages]
        which = envelope.which or [0] * len(endpoints)
        tickets: list[Ticket] = []
        for position, endpoint in enumerate(endpoints):
            data, own = messages[which[position]]
            if envelope.bare:
                endpoint.bare_calls = envelope.bare[position]
            tickets.append(submit(endpoint, role, method, data, own, returns, listed=False))
        return _ToRanks(tickets, returns == HALVED)


def _outputs(refs: Sequence[Any]) -> list[bytes | None]:
    """What ranks returned, as bytes that are equal where the outputs are; None for what is to go by reference.

    Raises:
        SomeFailed: as soon as one of them has failed.
    """
    try:
        with decoding(kept_encoded=True):
            outputs = ray.get(list(refs))
    except rayx.RayError as error:
        raise SomeFailed from error
    return [packed_output(output) for output in outputs]


def _be_as_nice_as(niceness: int) -> None:
    """Have the threads of this process, and those that they start, run before those of ranks, which Ray holds back.

    A relay that each rank it has sent a call to may interrupt sends the others theirs late.
    """
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        with contextlib.suppress(OSError):  # it has ended, or this user may not
            if os.getpriority(os.PRIO_PROCESS, int(thread)) > niceness:
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def _wait_for(refs: list[Any]) -> None:
    ray.wait(refs, num_returns=len(refs), fetch_local=False)


def _ended(refs: list[Any]) -> set[Any]:
    return set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])


def first_line(error: BaseException) -> str:
    """What Ray says of an error, shortly."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
