"""The hub: all channels and staleness managers of a process behind a common lock, and the peers that use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from phalanx.channels.channel_state import By, ChannelState, Item
from phalanx.channels.staleness_state import Done, ItemRows, RequestId, StalenessState
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process

Answer = Callable[[int | None, Any], None]
"""Sends a peer the ticket of its request and the answer, or None and the number of a stored item that has ended."""
CLOSED = ("gone", "it was closed")
Request = tuple[int, bool, str, str, tuple[Any, ...]]
"""Ticket, whether an answer is expected, key of the object (empty: the hub itself), verb and arguments."""
_WAITING_VERBS = frozenset({"take", "lease"})
"""Requests that are answered later. Other verbs call the method of that name, and are answered with its result."""


class StoredPayload(NamedTuple):
    """Bytes in the store of a process: the process's own number for them, and the address for other processes."""

    process: str
    number: int
    address: Any


class Hub:
    """Executes requests of peers. Answers are delivered outside of the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outbox: list[tuple[Answer, int | None, Any]] = []
        self._peers: dict[str, Answer] = {}
        self._states: dict[str, ChannelState | StalenessState] = {}

    def connect(self, peer: str, answer: Answer) -> None:
        """Add a process, or an inline rank. The name of this incarnation ends with "#" and a serial number."""
        with self._lock:
            self._peers[peer] = answer

    def execute(self, peer: str, requests: Sequence[Request]) -> None:
        """Execute requests of a peer. An answer is a tuple whose first word is the kind."""
        with self._lock:
            for ticket, is_answered, key, verb, args in requests:
                done = partial(self._post, peer, ticket) if is_answered else _ignore
                try:
                    self._execute((peer, ticket), done, key, verb, args)
                except ValueError as error:
                    done(("wrong", str(error)))
                except Exception as error:
                    done(("failed", f"{verb}: {type(error).__name__}: {error}"))
            outbox, self._outbox = self._outbox, []
        _deliver(outbox)

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue the channel leases of a dead process, drop its row leases, and count its stored items as lost."""
        with self._lock:
            if self._peers.pop(peer, None) is not None:
                for state in self._states.values():
                    state.peer_died(peer, why)
            outbox, self._outbox = self._outbox, []
        _deliver(outbox)

    def _post(self, peer: str, ticket: int | None, result: Any) -> None:
        if peer in self._peers:
            self._outbox.append((self._peers[peer], ticket, result))

    def _execute(self, request: RequestId, done: Done, key: str, verb: str, args: Sequence[Any]) -> None:
        state = self._states.get(key)
        if not key:
            done(("done", getattr(self, f"_{verb}")(*args)))
        elif state is None:
            done(CLOSED)
        elif verb == "put":
            self._put(state, request, done, *args)
        elif verb in _WAITING_VERBS:
            getattr(state, verb)(request, done, *args)
        else:
            done(("done", getattr(state, verb)(*args)))
        if isinstance(state, ChannelState):
            if process.sink is not None:  # each request costs microseconds
                count_level(state.name, *state.level())
            if state.closed and not state.leases:  # until then it reclaims the bytes of its items
                self._states.pop(key, None)

    @property
    def _channels(self) -> dict[str, ChannelState]:
        return {key: state for key, state in self._states.items() if isinstance(state, ChannelState)}

    def _open(self, key: str, name: str, maxsize: int | None, by: By) -> None:
        self._states[key] = ChannelState(name, maxsize, by, reclaim=self._reclaim, clock=time.monotonic)

    def _open_staleness(self, key: str, *numbers: int) -> None:
        self._states[key] = StalenessState(*numbers, evict=self._evict)

    def _put(
        self,
        channel: Any,
        request: RequestId,
        done: Done,
        packed: tuple[Any, int, int | None, tuple[float, ...]],
        leased: tuple[str, RequestId, tuple[int, ...]] | None,
    ) -> None:
        """Put an item. ``leased``: its staleness, the lease and the version of each row."""
        item = Item(request, *packed)
        if leased is not None:
            key, lease, item.versions = leased
            staleness: Any = self._states[key]
            if not staleness.begin_put(lease, item.versions):
                done(("accepted", -1, 0))
                return
            item.bounded = ItemRows(staleness, item.versions) if item.versions else None
        channel.put(done, item)

    def _reclaim(self, item: Item) -> None:
        if item.holder is not None:
            self._post(item.holder, None, item.payload.number)

    def _evict(self) -> None:
        for channel in self._channels.values():
            channel.expire()

    def _snapshot(self, keys: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return the states of channels and a staleness, all of the same moment; None if one of them is closed."""
        is_open = all(key in self._states for key in keys)
        return [self._states[key].state() for key in keys] if is_open else None

    def _restore(
        self, channels: Mapping[str, dict[str, Any]], staleness: str | None, state: dict[str, Any]
    ) -> None:
        """Have channels and a staleness continue from their states, unless they were used before."""
        for key in channels:
            if self._channels[key].items.submitted:
                raise ValueError(f"an item was put into channel {self._channels[key].name!r} already")
        if staleness is not None:
            bound: Any = self._states[staleness]
            if bound.stats().rows.submitted:
                raise ValueError("rows of the staleness were leased already")
            ranges = [units for saved in channels.values() for units in saved["ranges"]]
            for item in (units.item for units in ranges if units.item.versions):
                item.bounded = item.bounded or ItemRows(bound, item.versions)
            rows = [(units.item.bounded, range(units.start, units.stop)) for units in ranges]
            bound.restore(state, [(item, row) for item, numbers in rows if item for row in numbers])
        for key, saved in channels.items():
            self._channels[key].restore(saved)


def count_level(channel: str, waiting: int, oldest: float) -> None:
    """Record the length of a channel, and the age of its oldest item, in the trace of this process, if there is one."""
    if process.sink is not None:
        process.sink.count(CHANNEL + channel, {WAITING: waiting, OLDEST: 1e3 * oldest})


def _deliver(outbox: Sequence[tuple[Answer, int | None, Any]]) -> None:
    for answer, ticket, result in outbox:
        answer(ticket, result)


def _ignore(result: tuple[Any, ...]) -> None:
    """Receive an answer that no peer waits for."""
