"""The owner's side of a channel: the machine of :mod:`phalanx.channels.channel_state`, a clock, and who is to be
answered."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import FetchFailed
from phalanx.channels.channel_items import Item, Part
from phalanx.channels.channel_messages import (
    Accepted,
    Ack,
    Cancel,
    Close,
    CloseProducer,
    Drop,
    Dropped,
    Ended,
    Event,
    Expired,
    Finish,
    Freed,
    GiveBack,
    Given,
    Gone,
    HandOver,
    Instruction,
    Lost,
    Moved,
    Put,
    Refused,
    Released,
    Take,
    Tick,
    Unfit,
    Unneeded,
    Withdrawn,
)
from phalanx.channels.channel_snapshots import ChannelState, Depth
from phalanx.channels.channel_state import ChannelHome
from phalanx.channels.item_accounting import Tally
from phalanx.channels.losses import in_words
from phalanx.channels.payloads import PROCESS, InStore, kept, unpack
from phalanx.channels.payloads import pack as pack_value
from phalanx.channels.services import Answer, Peer, services
from phalanx.channels.state_server import Follow, Follower, Home, is_of
from phalanx.session.wait_threads import waiters
from phalanx.tracing.counters import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process
from phalanx.wire.codec import Policy

_log = logging.getLogger("phalanx")

#: Who holds the bytes that lie at the home itself.
HOME = "the home of the channel"


@dataclass(frozen=True)
class GivenPart:
    """What a consumer is told of a part: rows ``start`` to ``stop`` of an item, all of it if ``whole``."""

    number: int
    payload: Any
    start: int
    stop: int
    whole: bool
    rows: int
    nbytes: int
    lengths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measured:
    """A payload with the lengths of its rows."""

    payload: bytes | InStore
    lengths: tuple[float, ...]


@dataclass(frozen=True)
class Look:
    """A channel at one moment."""

    depth: Depth
    items: Tally
    rows: Tally
    reasons: dict[str, int]
    maxsize: int | None
    by: str
    consumers: tuple[tuple[str, int], ...]
    """Who has taken something and not acknowledged it, with the number of their leases."""


class ChannelService(Home[ChannelHome]):
    """The home of one channel, as a service of this process."""

    def __init__(
        self,
        key: str,
        machine: ChannelHome,
        transport: Backend,
        *,
        clock: Callable[[], float] = time.monotonic,
        due_sooner: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> None:
        super().__init__(key, machine, clock, due_sooner)
        self._name = name or key
        self._transport = transport
        self._leaving: dict[str, list[Answer]] = {}
        #: Told of items that will not be delivered: key of the channel, their numbers, "dropped" or "lost".
        self.undelivered: list[Callable[[str, list[int], str], None]] = []
        self._followed: dict[Hashable, Follow] = {}
        """Of puts whose rows a staleness follows."""
        self._closed = self._warned = False
        self._copies: dict[int, Any] = {}
        """What was handed over to this process, by item."""
        self._moved_from: dict[str, list[int]] = {}
        """What producers that leave have of these: somebody may be reading it until they are released."""

    def ask(
        self, peer: Peer, ticket: Hashable, answer: Answer | None, verb: str, args: Sequence[Any]
    ) -> None:
        with self._lock:
            self._peers[peer.name] = peer
            if verb == "look":
                self._reply(answer, self._look())
            elif verb == "state":
                self._reply(answer, self._machine.state())
            elif verb == "leave":
                self._leave(peer.name, answer, *args)
            else:
                if answer is not None:
                    self._answers[ticket] = answer
                self._closed = self._closed or verb == "close"
                self._do(self._event(peer.name, ticket, verb, args))
                if verb in ("finish", "close") and answer is not None:
                    del self._answers[ticket]
                    answer(("done",))

    @property
    def leaving(self) -> tuple[str, ...]:
        """Producers that end, and wait until nothing of them is needed."""
        return tuple(self._leaving)

    @property
    def alone(self) -> bool:
        """Whether nobody outside of this process can reach it."""
        return self._transport.immediate

    def look(self) -> Look:
        """How it is now."""
        with self._lock:
            return self._look()

    def drop(self, numbers: Sequence[int], reason: str) -> None:
        """Let go of some items that wait."""
        with self._lock:
            self._do(Drop(None, reason, frozenset(numbers)))

    def close(self, reason: str) -> None:
        """End it; see ``px.Channel.close``. What is lost, and was told to nobody, is a warning."""
        with self._lock:
            self._closed = True
            self._do(Close(reason))
            untold = self._machine.losses
        if untold and not self._warned:
            self._warned = True
            _log.warning(
                "channel %r was closed before anybody took what says so: items are lost with the process that had "
                "their bytes: %s. A rank that is closed keeps its items if the channel was made with handoff=True",
                self._name,
                in_words(untold),
            )

    @staticmethod
    def _reply(answer: Answer | None, what: Any) -> None:
        if answer is not None:
            answer(what)

    def _event(self, who: str, ticket: Hashable, verb: str, args: Sequence[Any]) -> Event:
        match verb, args:
            case "put", (payload, nbytes, rows, timeout, lengths, follow):
                holder = HOME if isinstance(payload, bytes) else None
                if lengths is not None:
                    payload = Measured(payload, lengths)
                if follow is not None:
                    self._followed[ticket] = follow
                return Put(ticket, who, payload, nbytes, rows, self._until(timeout), holder)
            case "take", (items, rows, timeout):
                return Take(ticket, who, items, rows, self._until(timeout))
            case "cancel", (number,):
                return Cancel((who, number))
            case "ack", (lease,):
                return Ack(lease)
            case "back", (lease, unreadable):
                return GiveBack(lease, unreadable)
            case "drop", (reason, *numbers):
                return Drop(ticket, reason, frozenset(numbers[0]) if numbers else None)
            case "finish", ():
                return Finish()
            case "close", (reason,):
                return Close(reason)
            case _:
                raise ValueError(f"a channel was asked to {verb} with {len(args)} arguments")

    def left(self, peer: Peer, why: str) -> None:
        with self._lock:
            if self._peers.pop(peer.name, None) is not None:
                self._do(Gone(peer.name, why))
                self._answers = {t: a for t, a in self._answers.items() if not is_of(t, peer.name)}
                self._followed = {t: f for t, f in self._followed.items() if not is_of(t, peer.name)}

    def _expire(self) -> None:
        self._do(Tick())

    def moved(self, payloads: dict[int, Any]) -> None:
        """Note that the home has the bytes of these items now."""
        with self._lock:
            self._do(Moved(HOME, payloads))

    def state(self) -> ChannelState:
        """What to save of it; payloads as they are."""
        with self._lock:
            return self._machine.state()

    def go_on_from(self, machine: ChannelHome) -> bool:
        """Have ``machine`` in place of this channel, unless something was put into it; who waits is served from it."""
        with self._lock:
            if self._machine.items.submitted:
                return False
            takes, self._machine = self._machine.waiting_takes, machine
            for take in takes:
                self._do(take)
            return True

    def _look(self) -> Look:
        machine = self._machine
        leases: dict[str, int] = {}
        for lease in machine.leases:
            leases[lease.consumer] = leases.get(lease.consumer, 0) + 1
        return Look(
            machine.depth(self._clock()),
            machine.items,
            machine.rows,
            dict(machine.reasons),
            machine.maxsize,
            machine.by,
            tuple(leases.items()),
        )

    def _do(self, event: Event) -> None:
        for instruction in self._machine.handle(event, self._clock()):
            self._follow(instruction)
        if process.count is not None:
            depth = self._machine.depth(self._clock())
            process.count(CHANNEL + self._name, {WAITING: depth.waiting, OLDEST: 1e3 * depth.oldest_item})
        if self._closed and not self._machine.leases:  # until then producers must hear what is freed
            services.remove(self)

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Accepted(ticket, number):
                self._answer(ticket, ("accepted", number))
                self._have_followed(ticket, number)
            case Refused(ticket, why):
                self._followed.pop(ticket, None)
                told = ("ended", self._machine.ended) if why == "closed" else ("refused", why)
                self._answer(ticket, told)
            case Given(ticket, lease, _, short):
                parts = tuple(map(_given, instruction.parts))
                self._answer(ticket, ("given", lease, parts, short))
            case Expired(ticket, items, rows):
                self._answer(ticket, ("expired", items, rows))
            case Unfit(ticket, item):
                self._answer(ticket, ("unfit", item.number, item.producer))
            case Lost(ticket, losses):
                self._answer(ticket, ("lost", losses))
            case Ended(ticket, why):
                self._answer(ticket, ("ended", why))
            case Dropped(ticket, items, rows):
                self._answer(ticket, ("dropped", items, rows))
            case Freed(items, end):
                self._free(items)
                if end != "delivered":
                    for tell in self.undelivered:
                        tell(self._key, [item.number for item in items], end)
            case HandOver(_, items):
                waiters.submit(lambda: self._hand_over(items))
            case Unneeded(_, numbers):
                self._forget_copies(numbers)
            case Released(producer):
                self._release(producer)
            case Withdrawn(ticket, True):
                self._followed.pop(ticket, None)
                self._answer(ticket, ("withdrawn",))
            case _:  # a lease that was over: it was given back when its process was taken for gone
                pass

    def _have_followed(self, ticket: Hashable, number: int) -> None:
        """Tell the staleness of its rows where they are; those that it let go of meanwhile leave at once."""
        key, lies = self._followed.pop(ticket, ("", None))
        follower = services.get(key) if key else None
        if isinstance(follower, Follower) and not follower.follow(self._key, number, lies):
            self._do(Drop(None, "stale", frozenset({number})))

    def _free(self, items: Sequence[Item]) -> None:
        by_holder: dict[str, list[int]] = {}
        for item in items:
            self._copies.pop(item.number, None)
            payload = bare(item.payload)
            if not isinstance(payload, InStore):
                continue
            if payload.process == PROCESS:
                kept.drop([payload.key])
            else:
                by_holder.setdefault(item.holder, []).append(payload.key)
        for holder, keys in by_holder.items():
            if holder in self._peers:
                self._peers[holder].tell(self._key, ("freed", keys))

    def _leave(self, who: str, answer: Answer | None, handoff: bool) -> None:
        if answer is not None:
            self._leaving.setdefault(who, []).append(answer)
        self._do(CloseProducer(who, handoff))
        if not self._machine.is_closing(who):
            self._release(who)

    def _release(self, who: str) -> None:
        keys = self._moved_from.pop(who, [])
        if keys and who in self._peers:
            self._peers[who].tell(self._key, ("freed", keys))
        for answer in self._leaving.pop(who, ()):
            answer(("released",))

    def _hand_over(self, items: Sequence[Item]) -> None:
        """Copy the bytes of items to this process; of those that are gone, their own loss tells."""
        copies: dict[int, Any] = {}
        for item in items:
            copy = self._copy_of(bare(item.payload))
            if copy is not None:
                measured = isinstance(item.payload, Measured)
                copies[item.number] = replace(item.payload, payload=copy) if measured else copy
        with self._lock:
            for item in items:
                source = bare(item.payload)
                if item.number in copies and source.process != PROCESS:
                    self._moved_from.setdefault(item.holder, []).append(source.key)
            self._copies |= {number: bare(copy) for number, copy in copies.items()}
            self._do(Moved(HOME, copies))

    def _copy_of(self, payload: InStore) -> bytes | InStore | None:
        """The same bytes, here; None where they are gone. Those of an inline rank are here already."""
        if payload.process == PROCESS:
            return payload
        try:
            value = unpack(self._transport, payload, Policy.VIEW)
        except FetchFailed:
            return None
        return pack_value(self._key, self._transport, value).payload

    def _forget_copies(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            payload = self._copies.pop(number, None)
            if isinstance(payload, InStore):
                kept.drop([payload.key])


def _given(part: Part) -> GivenPart:
    payload, cut = part.item.payload, part.cut
    lengths = payload.lengths[cut.start : cut.stop] if isinstance(payload, Measured) else ()
    return GivenPart(
        part.item.number,
        bare(payload),
        cut.start,
        cut.stop,
        part.is_whole,
        part.rows,
        part.nbytes,
        lengths,
    )


def bare(payload: Any) -> Any:
    """Where the bytes are."""
    return payload.payload if isinstance(payload, Measured) else payload
