"""Channels that this process owns, the hubs that serve them, and the names under which other processes find them."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from dataclasses import replace
from typing import Any

import cloudpickle

from phalanx.backends.backend_types import Backend
from phalanx.channels.channel_state import By, ChannelStatus, lost_items
from phalanx.channels.hub import count_level
from phalanx.channels.hub_client import HubObject, hubs
from phalanx.display.registry_records import CHANNEL_PREFIX, ChannelRecord, to_bytes
from phalanx.errors import DeclarationError, PhalanxError
from phalanx.session.background import Background
from phalanx.session.session import session
from phalanx.tracing.spans import process

_PUBLISHED_EVERY_S = 1.0
_TRACED_EVERY_S = 0.05
_CLOSES_WITHIN_S = 5.0
_log = logging.getLogger("phalanx")


def find_published(backend: Backend, name: str) -> Any | None:
    """Return the handle of the open channel ``name``, None if there is none."""
    data = backend.published(_published_key(backend, name))
    if data is not None:
        with contextlib.suppress(PhalanxError):  # a process that was killed leaves its record
            channel = pickle.loads(data)
            channel._request("status", timeout=_CLOSES_WITHIN_S)
            return channel
    return None


def _published_key(backend: Backend, name: str) -> str:
    return f"{CHANNEL_PREFIX}{backend.job}/{name}"


class LiveChannels:
    """Channels that this process created and did not close, by key."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._publisher = Background(self._turn)
        self._published: dict[str, ChannelRecord] = {}
        self._publish_at = 0.0

    def open(self, channel: HubObject, maxsize: int | None, by: By) -> None:
        """Create a channel, and publish its handle.

        Raises:
            DeclarationError: if a channel of that name is open in this run.
        """
        name, backend = channel.name, channel._backend
        if find_published(backend, name) is not None:
            raise DeclarationError(
                f"px.Channel(name={name!r}): a channel of that name is open in this run; close it first, use another "
                "name, or get the open channel by px.Channel.find(name)"
            )
        handle = cloudpickle.dumps(channel)  # first: its function for lengths may not be picklable
        channel._client().request("", "open", channel._key, name, maxsize, by)
        with self._lock:
            self._open[channel._key] = channel
        backend.publish(_published_key(backend, name), handle)
        if not backend.immediate:
            self._publisher.begin()

    def is_open(self, channel: HubObject) -> bool:
        """Return whether this process created a channel and did not close it."""
        return channel._key in self._open

    def close(self, channel: HubObject, reason: str) -> None:
        """Close a channel of this process. Losses that no take has reported are logged."""
        with self._lock:
            was_open = self._open.pop(channel._key, None)
            entry = self._published.pop(channel._key, None)
        if was_open is None:
            return
        with contextlib.suppress(PhalanxError):  # the hub has ended
            losses = channel._request("close", reason, timeout=_CLOSES_WITHIN_S)
            if losses:
                error = lost_items(channel.name, losses)
                _log.warning("channel %r was closed before a take reported a loss: %s", channel.name, error)
        backend = channel._backend
        if backend.connected():  # published values end with the cluster
            for key in (_published_key(backend, channel.name), *([entry.key] if entry else [])):
                backend.publish(key, None)

    def close_all(self, backend: Backend | None) -> None:
        """Close the channels of a backend, or all channels, and stop their hubs."""
        reason = "px.shutdown()" if backend is None else "the cluster was left"
        for channel in [*self._open.values()]:
            if backend in (None, channel._backend):
                self.close(channel, reason)
        hubs.stop(backend)

    def _turn(self) -> float | None:
        """Publish the status of channels for ``phalanx top``, and record their fill levels while a trace runs."""
        publish = time.monotonic() >= self._publish_at
        for channel in [*self._open.values()]:
            backend = channel._backend
            if backend.immediate or not backend.connected() or not (publish or process.sink):
                continue
            with contextlib.suppress(PhalanxError):  # it was closed
                status: ChannelStatus = channel._request("status", timeout=_CLOSES_WITHIN_S)
                count_level(channel.name, status.depth.waiting, status.depth.oldest_item)
                if publish:
                    self._publish(channel, channel_record(channel.name, channel._limit, status))
        if publish:
            self._publish_at = time.monotonic() + _PUBLISHED_EVERY_S
        return _TRACED_EVERY_S if self._open else None

    def _publish(self, channel: HubObject, entry: ChannelRecord) -> None:
        key, known = channel._key, replace(entry, changed=0.0)
        with self._lock:  # a channel that was closed in the meantime must not be published again
            if key in self._open and self._published.get(key) != known:
                self._published[key] = known
                channel._backend.publish(entry.key, to_bytes(entry))


def channel_record(name: str, limit: str, status: ChannelStatus) -> ChannelRecord:
    """Return the registry record of a channel."""
    depth, items, now = status.depth, status.items, time.time()
    counts = {each: getattr(depth, each) for each in ("waiting", "waiting_bytes", "puts", "takes")}
    counts |= {each: getattr(items, each) for each in ("taken", "delivered", "dropped", "lost")}
    oldest = round(now - depth.oldest_item, 1) if depth.waiting else None
    rate = round(depth.delivered_per_second, 1)
    return ChannelRecord(session.run_id, name, limit, per_second=rate, changed=now, oldest=oldest, **counts)


live_channels = LiveChannels()
"""Channels of this process."""
session.before_groups_close.append(live_channels.close_all)
