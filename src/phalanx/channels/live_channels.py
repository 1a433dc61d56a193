"""The channels that this process owns, and how others find them by name."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, replace

import cloudpickle

from phalanx.backends.api import Backend
from phalanx.channels.channel_server import ChannelService, Look
from phalanx.channels.channel_snapshots import By
from phalanx.channels.channel_state import ChannelHome
from phalanx.channels.channel_table import limit_of
from phalanx.channels.payloads import PROCESS, Lengths
from phalanx.channels.server import one_server
from phalanx.channels.service_client import Address, served
from phalanx.channels.services import services
from phalanx.display.registry_records import CHANNEL_PREFIX, ChannelEntry, to_bytes
from phalanx.errors import DeclarationError
from phalanx.session import session as cluster
from phalanx.session.background import Background

_TOLD_EVERY_S = 1.0
_numbers = itertools.count(1)
_own_keys = f"channel/{PROCESS}/"


@dataclass(frozen=True)
class ChannelCard:
    """What a handle on a channel is made from: where its home is, and what it was made with."""

    key: str
    name: str
    backend: str
    maxsize: int | None
    by: By
    handoff: bool
    lengths: Lengths | None = None
    address: Address | None = None


@dataclass(frozen=True)
class OpenChannel:
    """A channel of this process."""

    card: ChannelCard
    service: ChannelService
    transport: Backend


class OpenChannels:
    """Those that were made here and are not closed."""

    def __init__(self) -> None:
        self._open: dict[str, OpenChannel] = {}
        self._lock = threading.Lock()
        self._teller = Background("phalanx-channels", self._tell, first_after=_TOLD_EVERY_S)
        self._told: dict[str, ChannelEntry] = {}

    def make(
        self,
        machine: ChannelHome,
        name: str | None,
        handoff: bool,
        lengths: Lengths | None,
        backend: str | None,
    ) -> ChannelCard:
        """Open a channel and let others find it.

        Raises:
            DeclarationError: one of that name is open in this run.
        """
        transport = cluster.transport(backend)
        number = next(_numbers)
        name = name or f"channel-{number}"
        with self._lock:
            taken = any(one.card.name == name and one.transport is transport for one in self._open.values())
        if taken or transport.published(published_key(transport, name)) is not None:
            raise DeclarationError(
                f"px.Channel(name={name!r}): a channel of that name is open in this run; close it first, give another "
                "name, or get that one by px.Channel.find(name)"
            )
        address, due_sooner = served(transport)
        card = ChannelCard(
            f"{_own_keys}{number}",
            name,
            transport.name,
            machine.maxsize,
            machine.by,
            handoff,
            lengths,
            address,
        )
        service = ChannelService(card.key, machine, transport, due_sooner=due_sooner, name=name)
        services.add(service)
        with self._lock:
            self._open[card.key] = OpenChannel(card, service, transport)
        transport.publish(published_key(transport, name), cloudpickle.dumps(card))
        if not transport.immediate:
            self._teller.begin()
        return card

    def get(self, key: str) -> OpenChannel | None:
        """The channel of that key."""
        return self._open.get(key)

    def closed(self, key: str) -> None:
        """Note that one was closed."""
        with self._lock:
            one = self._open.pop(key, None)
            told = self._told.pop(key, None)
        if one is not None:
            one.transport.publish(published_key(one.transport, one.card.name), None)
            if told is not None:
                one.transport.publish(told.key, None)

    def _tell(self) -> float | None:
        """Publish how full they are, for `phalanx top`; those of which nothing has changed are left alone."""
        for one in list(self._open.values()):
            if one.transport.immediate or not one.transport.connected():
                continue
            entry = entry_of(one.card, one.service.look())
            with self._lock:  # one that is closed meanwhile is not published any more
                if one.card.key in self._open and self._told.get(one.card.key) != replace(entry, changed=0.0):
                    self._told[one.card.key] = replace(entry, changed=0.0)
                    one.transport.publish(entry.key, to_bytes(entry))
        return _TOLD_EVERY_S if self._open else None

    def close_all(self, transport: Backend | None) -> None:
        """Close those of a backend, or all."""
        for one in list(self._open.values()):
            if transport in (None, one.transport):
                one.service.close("the cluster was left" if transport is not None else "px.shutdown()")
                self.closed(one.card.key)
        if transport is None or not transport.immediate:
            one_server.stop()


def is_own(key: str) -> bool:
    """Whether this process made the channel of that key."""
    return key.startswith(_own_keys)


def published_key(transport: Backend, name: str) -> str:
    """Under which key the card of a channel is found by the processes of one job."""
    return f"{CHANNEL_PREFIX}{transport.job()}/{name}"


def entry_of(card: ChannelCard, look: Look) -> ChannelEntry:
    """A channel as it is published."""
    depth, items = look.depth, look.items
    now = time.time()
    return ChannelEntry(
        run=cluster.RUN_ID,
        name=card.name,
        limit=limit_of(card.maxsize, card.by),
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


open_channels = OpenChannels()
"""Those of this process."""
cluster.at_letting_go(cluster.Step.PART, open_channels.close_all)
