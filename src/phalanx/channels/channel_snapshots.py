"""Snapshots of channels with all their items, and of the staleness of their rows."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.backends.backend_types import FetchFailed
from phalanx.channels.batch import end_with_calls
from phalanx.channels.channel import Channel
from phalanx.channels.hub import StoredPayload
from phalanx.channels.hub_client import HubObject, reclaim
from phalanx.channels.live_channels import live_channels
from phalanx.channels.payloads import pack, row_lengths, to_bytes
from phalanx.channels.staleness import StalenessManager
from phalanx.channels.staleness_state import Gone, Item, SavedState
from phalanx.errors import ChannelError, DeclarationError
from phalanx.wire.codec import decode

_ATTEMPTS = 3


@dataclass(frozen=True)
class ChannelSnapshot:
    """States of channels by name, and of their staleness. Taken items count as waiting."""

    channels: Mapping[str, SavedState]
    staleness: SavedState | None


def snapshot(channels: Sequence[Channel], staleness: StalenessManager | None = None) -> bytes:
    """Return channels of this process with all their items, and their staleness, as bytes for :func:`restore`.

    All states are of the same moment. :func:`restore` unpickles the bytes: read them from trusted storage only.

    Raises:
        ChannelError: if the bytes of an item cannot be read, or an object is closed or belongs to another process.
    """
    objects = check_owned(channels, staleness)
    end_with_calls()
    for _ in range(_ATTEMPTS):
        states: list[SavedState] = _request(objects, "snapshot", [one._key for one in objects])
        saved = {one.name: state for one, state in zip(channels, states, strict=False)}
        try:
            for one in channels:
                for item in _items(saved[one.name]):
                    item.payload = to_bytes(one._backend, item.payload)
        except FetchFailed:  # an item was delivered or lost since: the next state does not contain it
            continue
        return pickle.dumps(ChannelSnapshot(saved, states[-1] if staleness else None), 5)
    raise ChannelError(
        "px.channels.snapshot: the bytes of some items cannot be read; take once more, so that the loss is reported, "
        "and try again"
    )


def restore(data: bytes, channels: Sequence[Channel], staleness: StalenessManager | None = None) -> None:
    """Restore channels of the same names, and a staleness, from a snapshot.

    Rows that were being generated or trained on when the snapshot was taken, and are in no channel, count as dropped.

    Raises:
        DeclarationError: as :func:`restore_values`.
        ChannelError, DispatchError: as :func:`read` and :func:`restore_values`.
    """
    check_owned(channels, staleness)
    restore_values(read(data, channels), channels, staleness)


def read(data: bytes, channels: Sequence[Channel]) -> ChannelSnapshot:
    """Return a snapshot that has the values of items in place of their bytes, and their lengths for ``channels``.

    Raises:
        ChannelError: if the bytes are not a snapshot, a value cannot be unpickled in this process, or the names of the
            channels differ from the snapshot's.
        DispatchError: if the rows of an item have no valid lengths for its channel.
    """
    try:
        saved: ChannelSnapshot = pickle.loads(data)
        for state in saved.channels.values():
            for item in _items(state):
                item.payload, item.stale = decode(item.payload), set()
    except Exception as error:
        raise ChannelError(
            f"px.channels.restore: the items of the snapshot cannot be read here: {type(error).__name__}: {error}"
        ) from error
    names = sorted(one.name for one in channels)
    if sorted(saved.channels) != names:
        raise ChannelError(
            f"px.channels.restore: the snapshot has the channels {sorted(saved.channels)}, expected {names}"
        )
    for one in channels:
        for item in _items(saved.channels[one.name]):
            item.lengths = row_lengths(one, item.payload, one._lengths, item.rows)
    return saved


def restore_values(
    saved: ChannelSnapshot, channels: Sequence[Channel], staleness: StalenessManager | None
) -> None:
    """Restore channels and a staleness from a snapshot that was read.

    Raises:
        DeclarationError: if an item was put or rows were leased before.
        DispatchError: if the object store has no capacity for the items.
        ChannelError: if a channel is closed or belongs to another process, or the process that hosts the channels
            died.
    """
    objects = check_owned(channels, staleness)
    if (saved.staleness is None) != (staleness is None):
        expected = "has none: leave it out" if saved.staleness is None else "has one: pass it too"
        raise ChannelError(f"px.channels.restore(staleness={staleness!r}): the snapshot {expected}")
    states = {one._key: saved.channels[one.name] for one in channels}
    items = [(one, item) for one in channels for item in _items(saved.channels[one.name])]
    try:
        for one, item in items:
            item.payload, item.request = pack(one, item.payload)[0], (one._client().name, -1)
        _request(objects, "restore", states, staleness and staleness._key, saved.staleness)
    except Exception as error:
        for _, item in items:
            if isinstance(item.payload, StoredPayload):
                reclaim(item.payload.number)
        if not isinstance(error, ValueError):
            raise
        raise DeclarationError(
            f"px.channels.restore: {error}; restore before the channels are used"
        ) from None


def check_owned(channels: Sequence[Channel], staleness: StalenessManager | None) -> list[HubObject]:
    """Return the objects, after a check that this process can save them together.

    Raises:
        DeclarationError: if ``channels`` is not a list of channels, or ``staleness`` is not a StalenessManager.
        ChannelError: if a channel is closed or belongs to another process, or the objects have different hubs.
    """
    # not iterated before: to iterate over a channel takes its items
    is_list = isinstance(channels, list | tuple) and all(isinstance(one, Channel) for one in channels)
    if not is_list or not isinstance(staleness, StalenessManager | None):
        raise DeclarationError(
            f"channels={channels!r}, staleness={staleness!r}: expected a list of px.Channel, and a StalenessManager or "
            "None"
        )
    for one in channels:
        if not live_channels.is_open(one):
            raise ChannelError(
                f"channel {one.name!r} is closed, or belongs to another process, which can save it",
                channel=one.name,
            )
    objects: list[HubObject] = [*channels, *([staleness] if staleness else [])]
    if len({id(one._client()) for one in objects}) > 1:
        raise ChannelError(
            "px.channels: channels and staleness of different backends cannot be saved together"
        )
    return objects


def _items(state: SavedState) -> list[Item]:
    return [*{units.number: units.item for units in state["ranges"]}.values()]


def _request(objects: Sequence[HubObject], verb: str, *args: Any) -> Any:
    """Send a request about several objects to their hub, and return its result."""
    if not objects:
        raise ChannelError("px.channels: no channel and no staleness was given; give at least one")
    try:
        return objects[0]._client().request("", verb, *args)
    except Gone as gone:
        raise ChannelError(f"px.channels.{verb}: {gone}") from None
