"""Channels that this process owns, the hubs that serve them, and the names under which other processes find them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from phalanx.backends.api import Backend
from phalanx.channels.channel_counts import ChannelStatus, limit_text, losses_text
from phalanx.channels.channel_state import By
from phalanx.channels.hub_client import PROCESS, HubClient, RemoteClient, clients
from phalanx.channels.hub_server import HubAddress, start_hub
from phalanx.channels.payloads import Lengths
from phalanx.display.registry_records import CHANNEL_PREFIX, ChannelEntry, to_bytes
from phalanx.errors import DeclarationError
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
    """Serialized form of a channel: its key and hub, and the arguments that it was created with."""

    key: str
    name: str
    backend: str
    maxsize: int | None
    by: By
    handoff: bool
    lengths: Lengths | None = None
    address: HubAddress | None = None

    @property
    def is_own(self) -> bool:
        """True if this process created the channel."""
        return self.key.split("/")[1] == PROCESS

    @property
    def limit(self) -> str:
        """Bound of the channel as text."""
        return limit_text(self.maxsize, self.by)


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
            service, address = self._services.get(backend, (None, None))
            client = None if address is None else clients.to("", address)
            if address is None or not isinstance(client, RemoteClient) or client.died:
                service, address = backend.start_service(start_hub)
                self._services[backend] = (service, address)
            return address

    def stop(self, backend: Backend | None) -> None:
        """Stop the hub of a backend, or all hubs."""
        for each in [each for each in self._services if backend in (None, each)]:
            service, address = self._services.pop(each)
            clients.close(address)
            each.stop_service(service)


own_hubs = OwnHubs()
"""Hubs of this process."""


def new_key(kind: str) -> str:
    """Return a key that is unique in the run and names this process."""
    return f"{kind}/{PROCESS}/{next(_numbers)}"


def published_key(backend: Backend, name: str) -> str:
    """Return the registry key of the handle of a channel."""
    return f"{CHANNEL_PREFIX}{backend.job()}/{name}"


class LiveChannels:
    """Channels that this process created and did not close."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[ChannelHandle, Backend]] = {}
        self._lock = threading.Lock()
        self._publisher = Background(self._turn)
        self._published: dict[str, ChannelEntry] = {}
        self._publish_at = 0.0

    def open(
        self,
        name: str | None,
        maxsize: int | None,
        by: By,
        handoff: bool,
        lengths: Lengths | None,
        backend: Backend,
    ) -> ChannelHandle:
        """Create a channel, and publish its handle.

        Raises:
            DeclarationError: if a channel of that name is open in this run.
        """
        key = new_key("channel")
        name = name or f"channel-{key.rpartition('/')[2]}"
        with self._lock:
            taken = any(handle.name == name and of is backend for handle, of in self._open.values())
        if taken or backend.published(published_key(backend, name)) is not None:
            raise DeclarationError(
                f"px.Channel(name={name!r}): a channel of that name is open in this run; close it first, use another "
                "name, or get the open channel by px.Channel.find(name)"
            )
        address = own_hubs.address(backend)
        handle = ChannelHandle(key, name, backend.name, maxsize, by, handoff, lengths, address)
        clients.to(key, address).request("", "open_channel", key, name, maxsize, by)
        with self._lock:
            self._open[key] = (handle, backend)
        backend.publish(published_key(backend, name), cloudpickle.dumps(handle))
        if address is not None:
            self._publisher.begin()
        return handle

    def is_open(self, handle: ChannelHandle) -> bool:
        """Return whether this process created a channel and did not close it."""
        return handle.key in self._open

    def close(self, handle: ChannelHandle, reason: str) -> None:
        """Close a channel of this process. Losses that no take has reported are logged."""
        with self._lock:
            _, backend = self._open.pop(handle.key, (None, None))
            entry = self._published.pop(handle.key, None)
        if backend is None:
            return
        answer = _answer(clients.to(handle.key, handle.address), handle.key, "close", reason)
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
        for handle, of in list(self._open.values()):
            if backend in (None, of):
                self.close(handle, reason)
        own_hubs.stop(backend)

    def _turn(self) -> float | None:
        """Publish the status of channels for ``phalanx top``, and record their fill levels while a trace runs."""
        publish = time.monotonic() >= self._publish_at
        for handle, backend in list(self._open.values()):
            if handle.address is None or not backend.connected() or not (publish or process.sink):
                continue
            answer = _answer(clients.to(handle.key, handle.address), handle.key, "status")
            if answer[0] != "done":
                continue
            if process.sink is not None:
                depth = answer[1].depth
                process.sink.count(
                    CHANNEL + handle.name, {WAITING: depth.waiting, OLDEST: 1e3 * depth.oldest_item}
                )
            if publish:
                self._publish(handle, backend, channel_entry(handle, answer[1]))
        if publish:
            self._publish_at = time.monotonic() + _PUBLISHED_EVERY_S
        return _TRACED_EVERY_S if self._open else None

    def _publish(self, handle: ChannelHandle, backend: Backend, entry: ChannelEntry) -> None:
        with self._lock:  # a channel that was closed in the meantime must not be published again
            if handle.key in self._open and self._published.get(handle.key) != replace(entry, changed=0.0):
                self._published[handle.key] = replace(entry, changed=0.0)
                backend.publish(entry.key, to_bytes(entry))


def _answer(client: HubClient, key: str, verb: str, *args: Any) -> tuple[Any, ...]:
    """Return the answer of a hub, ("gone", reason) if it does not answer in time."""
    with contextlib.suppress(concurrent.futures.TimeoutError):
        return client.ask(key, verb, *args)[1].result(_CLOSES_WITHIN_S)
    return ("gone", "its hub does not answer")


def channel_entry(handle: ChannelHandle, status: ChannelStatus) -> ChannelEntry:
    """Return the registry record of a channel."""
    depth, items = status.depth, status.items
    now = time.time()
    return ChannelEntry(
        run=session.run_id,
        name=handle.name,
        limit=handle.limit,
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


live_channels = LiveChannels()
"""Channels of this process."""
session.before_groups_close(live_channels.close_all)
