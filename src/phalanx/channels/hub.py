"""The hub: all channels and staleness managers of a process behind a common lock, and the peers that use them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from phalanx.channels.channel_state import By, ChannelState, Item
from phalanx.channels.staleness_state import Done, RequestId, StalenessState

CLOSED = ("gone", "it was closed")
_WAITING_VERBS = frozenset({"take", "lease", "watch"})
"""Requests that are answered later. Other verbs call the method of that name, and are answered with its result."""


class StoredPayload(NamedTuple):
    """Bytes in the store of a process: the process's own number for them, and the address for other processes."""

    process: str
    number: int
    address: Any


class Hub:
    """Executes requests of peers. Answers are delivered outside of the lock.

    ``changed`` is called with a channel after each request to it.
    """

    def __init__(self, changed: Callable[[ChannelState], None] = lambda channel: None) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._outbox: list[tuple[Callable[[Any], None], Any]] = []
        self._peers: dict[str, Callable[[int], None]] = {}
        self._states: dict[str, ChannelState | StalenessState] = {}

    def connect(self, peer: str, reclaim: Callable[[int], None]) -> None:
        """Add a process, or an inline rank. ``reclaim`` tells it which of its stored items is not needed any more.

        ``peer`` names this incarnation of the process, with a serial number after the last "#".
        """
        with self._lock:
            self._peers[peer] = reclaim

    def ask(self, request: RequestId, answer: Done | None, key: str, verb: str, args: Sequence[Any]) -> None:
        """Execute a request to the object of a key, to the hub itself if that is empty.

        ``answer`` is called once with a tuple whose first word is the kind.
        """

        def done(result: tuple[Any, ...]) -> None:
            if answer is not None:
                self._outbox.append((answer, result))

        with self._lock:
            try:
                self._execute(request, done, key, verb, args)
            except ValueError as error:
                done(("wrong", str(error)))
            except Exception as error:
                done(("failed", f"{verb}: {type(error).__name__}: {error}"))
            outbox, self._outbox = self._outbox, []
        for deliver, result in outbox:
            deliver(result)

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue the channel leases of a dead process, drop its row leases, and count its stored items as lost."""
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            for state in [*self._states.values()]:
                state.peer_died(peer, why)
            self._forget_closed()
            outbox, self._outbox = self._outbox, []
        for deliver, result in outbox:
            deliver(result)

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
            self._changed(state)
            if state.closed:
                self._forget_closed()

    def _forget_closed(self) -> None:
        """Remove closed channels. Until its last lease ends, a channel reclaims the bytes of its items."""
        for key, state in [*self._states.items()]:
            if isinstance(state, ChannelState) and state.closed and not state.leases:
                del self._states[key]

    def _open(self, key: str, name: str, maxsize: int | None, by: By) -> None:
        self._states[key] = ChannelState(name, maxsize, by, reclaim=self._reclaim, clock=time.monotonic)

    def _open_staleness(self, key: str, *numbers: int) -> None:
        self._states[key] = StalenessState(*numbers, evict=self._evict)

    def _put(
        self,
        channel: Any,
        request: RequestId,
        done: Done,
        payload: bytes | StoredPayload,
        nbytes: int,
        rows: int | None,
        lengths: tuple[float, ...],
        leased: tuple[str, int, tuple[int, ...]] | None,
    ) -> None:
        """Put an item. ``leased``: its staleness, the lease and the version of each row."""
        holder = None if isinstance(payload, bytes) else request[0]
        item = Item(request[0], payload, nbytes, rows, lengths, holder)
        if leased is not None:
            key, lease, item.versions = leased
            staleness: Any = self._states[key]
            if not staleness.begin_put(lease, item.versions):
                done(("accepted", -1, 0))
                return
            item.bound = staleness if item.versions else None
        channel.put(request, done, item)

    def _reclaim(self, item: Item) -> None:
        if isinstance(item.payload, StoredPayload) and item.holder in self._peers:
            self._outbox.append((self._peers[item.holder], item.payload.number))

    def _evict(self, bound: StalenessState, surplus: Counter[int]) -> None:
        for channel in self._states.values():
            if isinstance(channel, ChannelState):
                channel.expire(bound, surplus)

    def _snapshot(self, keys: Sequence[str]) -> list[dict[str, Any]] | None:
        """Return the states of channels and a staleness, all of the same moment; None if one of them is closed."""
        is_open = all(key in self._states for key in keys)
        return [self._states[key].state() for key in keys] if is_open else None

    def _restore(
        self, channels: dict[str, dict[str, Any]], staleness: str | None, state: dict[str, Any] | None
    ) -> None:
        """Have channels and a staleness continue from their states, unless they were used before."""
        for key in channels:
            channel: Any = self._states[key]
            if channel.items.submitted:
                raise ValueError(f"an item was put into channel {channel.name!r} already")
        bound: Any = None if staleness is None else self._states[staleness]
        if bound is not None:
            if bound.stats().rows.submitted:
                raise ValueError("rows of the staleness were leased already")
            ranges = [(saved, units) for saved in channels.values() for units in saved["ranges"]]
            versions = [saved["items"][units.number].versions_in(units) for saved, units in ranges]
            bound.restore(state, [*chain.from_iterable(versions)])
        for key, saved in channels.items():
            channel = self._states[key]
            channel.restore(saved, bound)
