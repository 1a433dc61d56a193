"""Channels that this process owns, the hubs that serve them, and the names under which other processes find them."""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from phalanx.backends.api import Backend
from phalanx.channels.channel_state import By, ChannelStatus, Loss
from phalanx.channels.hub_client import PROCESS, clients
from phalanx.channels.hub_server import HubAddress, start_hub
from phalanx.channels.payloads import Lengths
from phalanx.channels.staleness_state import display_name
from phalanx.display.byte_format import size
from phalanx.display.registry_records import CHANNEL_PREFIX, ChannelEntry, to_bytes
from phalanx.errors import DeclarationError, ItemsLost
from phalanx.session.background import Background
from phalanx.session.session import session
from phalanx.tracing.events import CHANNEL, OLDEST, WAITING
from phalanx.tracing.spans import process

_PUBLISHED_EVERY_S = 1.0
_TRACED_EVERY_S = 0.05
_CLOSES_WITHIN_S = 5.0
_numbers = itertools.count(1)
_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class ChannelHandle:
    """Serialized form of a channel. ``limit`` is its bound as text."""

    key: str
    name: str
    backend: str
    limit: str
    handoff: bool
    lengths: Lengths | None
    address: HubAddress | None


class OwnHubs:
    """Hubs of this process, by backend. On Ray a hub has a process of its own, which ends with this process."""

    def __init__(self) -> None:
        self._services: dict[Backend, tuple[Any, HubAddress]] = {}
        self._lock = threading.Lock()

    def address(self, backend: Backend) -> HubAddress | None:
        """Return the address of the hub, which is started if necessary; None for the hub within this process."""
        if backend.immediate:
            return None
        with self._lock:
            if backend not in self._services or clients.to_remote(self._services[backend][1]).died:
                self._services[backend] = backend.start_service(start_hub)
            return self._services[backend][1]

    def stop(self, backend: Backend | None) -> None:
        """Stop the hub of a backend, or all hubs."""
        for each in [each for each in self._services if backend in (None, each)]:
            service, address = self._services.pop(each)
            clients.to_remote(address).close()
            each.stop_service(service)


own_hubs = OwnHubs()
"""Hubs of this process."""


def new_key(kind: str) -> str:
    """Return a key that is unique in the run and names this process."""
    return f"{kind}/{PROCESS}/{next(_numbers)}"


def published_key(backend: Backend, name: str) -> str:
    """Return the registry key of the handle of a channel."""
    return f"{CHANNEL_PREFIX}{backend.job()}/{name}"


def _is_open(handle: ChannelHandle) -> bool:
    """Return whether a published channel is open: a process that was killed leaves its record."""
    answer = clients.to(handle.key, handle.address).request(handle.key, "status", timeout=_CLOSES_WITHIN_S)
    return answer[0] != "gone"


class LiveChannels:
    """Channels that this process created and did not close."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[ChannelHandle, Backend]] = {}
        self._lock = threading.Lock()
        self._publisher = Background(self._turn)
        self._published: dict[str, ChannelEntry] = {}
        self._publish_at = 0.0

    def open(self, handle: ChannelHandle, backend: Backend, maxsize: int | None, by: By) -> None:
        """Create a channel, and publish its handle.

        Raises:
            DeclarationError: if a channel of that name is open in this run.
        """
        name = handle.name
        known = backend.published(published_key(backend, name))
        if known is not None and _is_open(pickle.loads(known)):
            raise DeclarationError(
                f"px.Channel(name={name!r}): a channel of that name is open in this run; close it first, use another "
                "name, or get the open channel by px.Channel.find(name)"
            )
        clients.to(handle.key, handle.address).request("", "open", handle.key, name, maxsize, by)
        with self._lock:
            self._open[handle.key] = (handle, backend)
        backend.publish(published_key(backend, name), cloudpickle.dumps(handle))
        if handle.address is not None:
            self._publisher.begin()

    def is_open(self, key: str) -> bool:
        """Return whether this process created a channel and did not close it."""
        return key in self._open

    def close(self, key: str, reason: str) -> None:
        """Close a channel of this process. Losses that no take has reported are logged."""
        with self._lock:
            handle, backend = self._open.pop(key, (None, None))
            entry = self._published.pop(key, None)
        if handle is None or backend is None:
            return
        client = clients.to(key, handle.address)
        answer = client.request(key, "close", reason, timeout=_CLOSES_WITHIN_S)
        if answer[0] == "done" and answer[1]:
            _log.warning(
                "channel %r was closed before anybody took what says so: items were lost with the process that "
                "stored their bytes: %s. A rank that is closed keeps its items if the channel was created with "
                "handoff=True",
                handle.name,
                losses_text(answer[1]),
            )
        if backend.connected():  # published values end with the cluster
            backend.publish(published_key(backend, handle.name), None)
            if entry is not None:
                backend.publish(entry.key, None)

    def close_all(self, backend: Backend | None) -> None:
        """Close the channels of a backend, or all channels, and stop their hubs."""
        reason = "px.shutdown()" if backend is None else "the cluster was left"
        for key, (_, of) in list(self._open.items()):
            if backend in (None, of):
                self.close(key, reason)
        own_hubs.stop(backend)

    def _turn(self) -> float | None:
        """Publish the status of channels for ``phalanx top``, and record their fill levels while a trace runs."""
        publish = time.monotonic() >= self._publish_at
        for handle, backend in list(self._open.values()):
            if handle.address is None or not backend.connected() or not (publish or process.sink):
                continue
            client = clients.to_remote(handle.address)
            answer = client.request(handle.key, "status", timeout=_CLOSES_WITHIN_S)
            if answer[0] != "done":
                continue
            depth = answer[1].depth
            if process.sink is not None:
                level = {WAITING: depth.waiting, OLDEST: 1e3 * depth.oldest_item}
                process.sink.count(CHANNEL + handle.name, level)
            if publish:
                self._publish(handle.key, backend, channel_entry(handle.name, handle.limit, answer[1]))
        if publish:
            self._publish_at = time.monotonic() + _PUBLISHED_EVERY_S
        return _TRACED_EVERY_S if self._open else None

    def _publish(self, key: str, backend: Backend, entry: ChannelEntry) -> None:
        with self._lock:  # a channel that was closed in the meantime must not be published again
            if key in self._open and self._published.get(key) != replace(entry, changed=0.0):
                self._published[key] = replace(entry, changed=0.0)
                backend.publish(entry.key, to_bytes(entry))


def channel_entry(name: str, limit: str, status: ChannelStatus) -> ChannelEntry:
    """Return the registry record of a channel."""
    depth, items = status.depth, status.items
    now = time.time()
    return ChannelEntry(
        run=session.run_id,
        name=name,
        limit=limit,
        waiting=depth.waiting,
        waiting_bytes=depth.waiting_bytes,
        taken=items.taken,
        puts=depth.puts,
        takes=depth.takes,
        delivered=items.delivered,
        dropped=items.dropped,
        lost=items.lost,
        per_second=round(depth.delivered_per_second, 1),
        changed=now,
        oldest=round(now - depth.oldest_item, 1) if depth.waiting else None,
    )


def limit_text(maxsize: int | None, by: str) -> str:
    """Return the bound of a channel as text."""
    if maxsize is None:
        return "any number of items"
    return size(maxsize) if by == "bytes" else f"{maxsize} item{'s' if maxsize > 1 else ''}"


def losses_text(losses: Iterable[Loss]) -> str:
    """Return the losses as text, by process."""
    return "; ".join(f"{_counts_text(loss)} of {display_name(loss.holder)}: {loss.why}" for loss in losses)


def _counts_text(loss: Loss) -> str:
    counts = ((loss.items, "item"), (loss.rows, "row"), (loss.puts, "waiting put"))
    return ", ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in counts if count)


def lost_items(channel: str, losses: Sequence[Loss]) -> ItemsLost:
    """Return the error that names the lost items and the processes that stored them."""
    error = ItemsLost(
        f"channel {channel!r}: items were lost with the process that stored their bytes: "
        f"{losses_text(losses) or 'part of this batch'}. Other items can be taken; to keep items longer than the "
        "process that put them, drain the channel before that process is closed, or create it with handoff=True",
        channel=channel,
    )
    error.losses = tuple(losses)
    return error


live_channels = LiveChannels()
"""Channels of this process."""
session.before_groups_close(live_channels.close_all)
