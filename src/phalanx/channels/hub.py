"""The hub: all channels and staleness managers of a process behind a common lock, and the peers that use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from phalanx.channels.channel_counts import display_name
from phalanx.channels.channel_items import Item, RowRange
from phalanx.channels.channel_state import By, ChannelState
from phalanx.channels.staleness_state import Done, ReadyRows, StalenessState

CLOSED = ("gone", "it was closed")
#: Requests to the hub itself, and requests that call the method of that name of a channel or a staleness.
_HUB_VERBS = frozenset({"open_channel", "open_staleness", "snapshot", "restore", "cancel"})
_CHANNEL_VERBS = frozenset({"ack", "requeue", "drop", "finish", "close", "status", "held_by", "move"})
_STALENESS_VERBS = frozenset({"accept", "drop", "end", "serve", "close", "stats"})


class StoredPayload(NamedTuple):
    """Bytes in the store of a process: the process's own number for them, and the address for other processes."""

    process: str
    number: int
    address: Any


class PutOffer(NamedTuple):
    """An item to put. ``leased``: its staleness, the lease and the version of each row."""

    payload: bytes | StoredPayload
    nbytes: int
    rows: int | None
    lengths: tuple[float, ...] = ()
    leased: tuple[str, int, tuple[int, ...]] | None = None


class Hub:
    """Executes requests of peers. Answers are delivered outside of the lock.

    ``changed`` is called with a channel after each request to it.
    """

    def __init__(self, changed: Callable[[ChannelState], None] = lambda channel: None) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._outbox: list[tuple[Done, tuple[Any, ...]]] = []
        self._peers: dict[str, Done] = {}
        self._channels: dict[str, ChannelState] = {}
        self._stalenesses: dict[str, StalenessState] = {}
        self._cancels: dict[Hashable, Callable[[], None]] = {}

    def connect(self, peer: str, tell: Done) -> None:
        """Add a process, or an inline rank. ``tell`` sends it a notification without waiting.

        ``peer`` names this incarnation of the process, with a serial number after the last "#".
        """
        with self._lock:
            self._peers[peer] = tell

    def ask(
        self, peer: str, ticket: int, answer: Done | None, key: str, verb: str, args: Sequence[Any]
    ) -> None:
        """Execute a request. ``answer`` is called once with a tuple whose first word is the kind."""
        request = (peer, ticket)

        def done(result: tuple[Any, ...]) -> None:
            self._cancels.pop(request, None)
            if answer is not None:
                self._outbox.append((answer, result))

        with self._lock:
            try:
                self._execute(key, verb, request, done, args)
            except ValueError as error:
                done(("wrong", str(error)))
            except Exception as error:
                done(("failed", f"{verb}: {type(error).__name__}: {error}"))
            outbox, self._outbox = self._outbox, []
        for deliver, result in outbox:
            deliver(result)

    def peer_died(self, peer: str, why: str) -> None:
        """Requeue and drop the leases of a dead process."""
        with self._lock:
            if self._peers.pop(peer, None) is None:
                return
            for staleness in self._stalenesses.values():
                staleness.peer_died(peer, f"{display_name(peer)}: {why}")
            for channel in list(self._channels.values()):
                channel.peer_died(peer, why)
            self._forget_closed()
            outbox, self._outbox = self._outbox, []
        for deliver, result in outbox:
            deliver(result)

    def _forget_closed(self) -> None:
        """Remove closed channels. Until its last lease ends, a channel reclaims the bytes of its items."""
        over = [key for key, channel in self._channels.items() if channel.closed and not channel.leases]
        for key in over:
            del self._channels[key]

    def _execute(
        self, key: str, verb: str, request: tuple[str, int], done: Done, args: Sequence[Any]
    ) -> None:
        if verb in _HUB_VERBS:
            getattr(self, f"_{verb}")(request, done, *args)
        elif key in self._channels:
            channel = self._channels[key]
            if verb in _CHANNEL_VERBS:
                done(("done", getattr(channel, verb)(*args)))
            else:
                getattr(self, f"_channel_{verb}")(channel, request, done, *args)
            self._changed(channel)
            if channel.closed:
                self._forget_closed()
        elif key in self._stalenesses:
            staleness = self._stalenesses[key]
            if verb in _STALENESS_VERBS:
                done(("done", getattr(staleness, verb)(*args)))
            else:
                getattr(self, f"_staleness_{verb}")(staleness, request, done, *args)
        else:
            done(CLOSED)

    def _note(self, peer: str | None, *note: Any) -> None:
        if peer in self._peers:
            self._outbox.append((self._peers[peer], note))

    def _wait(self, key: tuple[str, int], waits: bool, state: Any, request: Any) -> None:
        """Cancel a request without a response: immediately, or when its peer requests it."""
        if request is None:
            return
        if waits:
            self._cancels[key] = lambda: state.cancel(request)
        else:
            state.cancel(request)

    def _cancel(self, request: tuple[str, int], done: Done, ticket: int) -> None:
        cancel = self._cancels.get((request[0], ticket))
        if cancel is not None:
            cancel()
        done(("done", None))

    # Channels

    def _open_channel(
        self, request: Any, done: Done, key: str, name: str, maxsize: int | None, by: By
    ) -> None:
        def reclaim(item: Item) -> None:
            if isinstance(item.payload, StoredPayload):
                self._note(item.holder, "reclaim", item.payload.number)

        self._channels[key] = ChannelState(key, maxsize, by, name, reclaim=reclaim, clock=time.monotonic)
        done(("done", None))

    def _channel_put(
        self, channel: ChannelState, request: tuple[str, int], done: Done, offer: PutOffer, waits: bool
    ) -> None:
        peer, payload = request[0], offer.payload
        holder = None if isinstance(payload, bytes) else peer
        item = Item(peer, payload, offer.nbytes, offer.rows, holder, offer.lengths)
        finish = done
        if offer.leased is not None:
            key, lease, item.versions = offer.leased
            staleness = self._stalenesses[key]
            if not staleness.begin_put(lease, item.versions):
                done(("accepted", -1, 0))
                return
            item.bound = staleness if item.versions else None
            finish = _reporting_failure(staleness, len(item.versions), done)
        self._wait(request, waits, channel, channel.put(item, finish))

    def _channel_take(
        self,
        channel: ChannelState,
        request: tuple[str, int],
        done: Done,
        items: int | None,
        rows: int | None,
        at_least: int | None,
        waits: bool,
    ) -> None:
        self._wait(request, waits, channel, channel.take(request[0], request, done, items, rows, at_least))

    def _channel_leave(self, channel: ChannelState, request: tuple[str, int], done: Done) -> None:
        channel.leave(request[0], done)

    # Stalenesses

    def _open_staleness(self, request: Any, done: Done, key: str, *numbers: int) -> None:
        def overdue(peer: str, lease: int) -> None:
            self._note(peer, "overdue", key, lease)

        self._stalenesses[key] = StalenessState(*numbers, overdue=overdue)
        done(("done", None))

    def _staleness_lease(
        self, staleness: StalenessState, request: tuple[str, int], done: Done, rows: int, waits: bool
    ) -> None:
        self._wait(request, waits, staleness, staleness.lease(request[0], rows, done))

    def _staleness_advance(
        self,
        staleness: StalenessState,
        request: Any,
        done: Done,
        version: int,
        trained: int | None,
        serving: bool,
    ) -> None:
        for rows in staleness.advance(version, trained, serving):
            channel = self._channels.get(rows.token[0])
            if channel is not None:
                channel.drop_rows(RowRange(rows.token[1], rows.start, rows.stop))
        for channel in self._channels.values():
            channel.expire()
        done(("done", None))

    # Snapshots

    def _snapshot(self, request: Any, done: Done, channels: Sequence[str], staleness: str | None) -> None:
        """Answer with the states of channels and a staleness, all of the same moment."""
        if not {*channels} <= self._channels.keys() or staleness not in (None, *self._stalenesses):
            done(CLOSED)
            return
        states = {each: self._channels[each].state() for each in channels}
        done(("snapshot", states, self._stalenesses[staleness].state() if staleness else None))

    def _restore(
        self,
        request: Any,
        done: Done,
        channels: dict[str, dict[str, Any]],
        staleness: str | None,
        state: dict[str, Any] | None,
        accepted: Sequence[ReadyRows],
    ) -> None:
        """Have channels and a staleness continue from their states, unless they were used before."""
        for each in channels:
            if self._channels[each].items.submitted:
                raise ValueError(f"an item was put into channel {self._channels[each].name!r} already")
        bound = self._stalenesses[staleness] if staleness else None
        if bound is not None and state is not None:
            if bound.stats().rows.submitted:
                raise ValueError("rows of the staleness were leased already")
            bound.restore(state, accepted)
        for each, saved in channels.items():
            self._channels[each].restore(saved, bound)
        done(("done", None))


def _reporting_failure(staleness: StalenessState, rows: int, done: Done) -> Done:
    """Return a callback of a put that drops its rows if the channel did not accept them."""

    def finish(result: tuple[Any, ...]) -> None:
        if result[0] != "accepted":
            staleness.fail_put(rows)
        done(result)

    return finish
