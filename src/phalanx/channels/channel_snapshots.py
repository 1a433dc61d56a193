"""Snapshots: channels with all their bytes, and the staleness of their rows."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import FetchFailed
from phalanx.channels.channel import Channel
from phalanx.channels.hub_client import HubClient
from phalanx.channels.live_channels import live_channels
from phalanx.channels.payloads import pack, to_bytes
from phalanx.channels.staleness import StalenessManager
from phalanx.channels.staleness_state import ReadyRows
from phalanx.display.byte_format import size
from phalanx.errors import ChannelError, DeclarationError
from phalanx.wire.codec import decode

_ATTEMPTS = 3


@dataclass(frozen=True)
class ChannelSnapshot:
    """States of channels by name, and of their staleness. Taken items wait again in it."""

    channels: Mapping[str, dict[str, Any]]
    staleness: dict[str, Any] | None


def snapshot(channels: Sequence[Channel], staleness: StalenessManager | None = None) -> bytes:
    """Return channels of this process with all their items, and their staleness, as bytes for :func:`restore`.

    All states are of the same moment. The bytes are unpickled by :func:`restore`: read them from trusted storage only.

    Raises:
        ChannelError: if the bytes of an item cannot be read, or an object is closed or belongs to another process.
    """
    check_owned(channels, staleness)
    names = {one._handle.key: one.name for one in channels}
    for _ in range(_ATTEMPTS):
        answer = _request(channels, staleness, "snapshot", list(names), staleness and staleness._key)
        if answer[0] != "snapshot":
            raise ChannelError(
                "px.channels.snapshot: a channel or the staleness was closed; it cannot be saved"
            )
        try:
            states = {one.name: _with_bytes(answer[1][one._handle.key], one._backend) for one in channels}
        except FetchFailed:  # an item was delivered or lost since: the next state does not contain it
            continue
        saved = ChannelSnapshot(states, answer[2] and _with_names(answer[2], names))
        return pickle.dumps(saved, pickle.HIGHEST_PROTOCOL)
    raise ChannelError(
        "px.channels.snapshot: the bytes of some items cannot be read; take once more, so that the loss is reported, "
        "and try again"
    )


def restore(data: bytes, channels: Sequence[Channel], staleness: StalenessManager | None = None) -> None:
    """Have channels of the same names, and a staleness, continue from a snapshot.

    Rows that were generated or trained on when the snapshot was taken, and are in no channel, count as dropped.

    Raises:
        DeclarationError: if an item was put or rows were leased before.
        ChannelError: if a channel is not in the snapshot, or an object belongs to another process.
    """
    check_owned(channels, staleness)
    saved: ChannelSnapshot = pickle.loads(data)
    keys = {one.name: one._handle.key for one in channels}
    if saved.channels.keys() != keys.keys():
        raise ChannelError(
            f"px.channels.restore: the snapshot has the channels {sorted(saved.channels)}, expected {sorted(keys)}"
        )
    states = {one._handle.key: _with_payloads(saved.channels[one.name], one) for one in channels}
    key = staleness._key if staleness is not None and saved.staleness is not None else None
    accepted = [] if saved.staleness is None else _accepted(saved.channels, saved.staleness, keys)
    try:
        _request(channels, staleness, "restore", states, key, saved.staleness, accepted)
    except ValueError as error:
        raise DeclarationError(
            f"px.channels.restore: {error}; restore before anything else happens"
        ) from None


def describe(data: bytes) -> dict[str, str]:
    """Return a text for each channel of a snapshot, and for the staleness."""
    saved: ChannelSnapshot = pickle.loads(data)
    texts = {
        f"channels/{name}": f"{len(state['items'])} items, {size(sum(item.nbytes for item in state['items']))}"
        for name, state in saved.channels.items()
    }
    if saved.staleness is not None:
        stats = saved.staleness["stats"]
        texts["staleness"] = f"version {stats.version} in training, {stats.rows.ready} rows ready"
    return texts


def check_owned(channels: Sequence[Channel], staleness: StalenessManager | None) -> None:
    """Check that this process can save channels and a staleness together.

    Raises:
        ChannelError: if a channel is closed or belongs to another process, or a hub is not the hub of the others.
    """
    for one in channels:
        if not live_channels.is_open(one._handle):
            raise ChannelError(
                f"channel {one.name!r} is closed, or belongs to another process, which can save it",
                channel=one.name,
            )
    if len({id(each._client()) for each in (*channels, *([staleness] if staleness else []))}) > 1:
        raise ChannelError(
            "px.channels: channels and staleness of different backends cannot be saved together"
        )


def _request(channels: Sequence[Channel], staleness: StalenessManager | None, verb: str, *args: Any) -> Any:
    client: HubClient = (*channels, *([staleness] if staleness else []))[0]._client()
    return client.request("", verb, *args)


def _with_bytes(state: dict[str, Any], backend: Backend) -> dict[str, Any]:
    items = [replace(item, payload=to_bytes(backend, item.payload), holder=None) for item in state["items"]]
    return {**state, "items": items}


def _with_payloads(state: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Return a state whose large items are stored by this process."""
    client = channel._client()
    items = []
    for item in state["items"]:
        payload = pack(channel._handle.key, channel._backend, decode(item.payload)).payload
        holder = None if isinstance(payload, bytes) else client.name
        items.append(replace(item, payload=payload, holder=holder, producer=client.name))
    return {**state, "items": items}


def _with_names(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a staleness state in which rows in channels are located by the name of their channel."""
    accepted = [
        replace(rows, token=(names[rows.token[0]], rows.token[1])) if rows.token[0] in names else rows
        for rows in state["accepted"]
    ]
    return {**state, "accepted": accepted}


def _accepted(
    channels: Mapping[str, dict[str, Any]], staleness: dict[str, Any], keys: Mapping[str, str]
) -> list[ReadyRows]:
    """Return the accepted rows that exist in the snapshot: in a channel, or accepted without a channel."""
    found: list[ReadyRows] = []
    for rows in staleness["accepted"]:
        name, number, *_ = rows.token
        if name == "lease":
            found += [rows] if keys else []
        elif name in keys:
            for units in channels[name]["ranges"]:
                first, last = max(rows.start, units.start), min(rows.stop, units.stop)
                if units.number == number and first < last:
                    found.append(replace(rows.part(first, last), token=(keys[name], number)))
    return found
