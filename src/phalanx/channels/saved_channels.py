"""A channel as a value that pickles: order, counts and the bytes of all that waits or is taken."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import FetchFailed
from phalanx.channels.channel_server import HOME, Measured, bare
from phalanx.channels.channel_snapshots import ChannelState
from phalanx.channels.channel_state import ChannelHome
from phalanx.channels.live_channels import OpenChannel
from phalanx.channels.payloads import Lengths, pack, unpack
from phalanx.errors import ChannelError
from phalanx.wire.codec import Policy, decode, encode

_ATTEMPTS = 3
_LOADED = "loaded"


@dataclass(frozen=True)
class SavedChannel:
    """What ``Channel.save()`` gives. What was taken and not acknowledged waits again in it."""

    name: str
    handoff: bool
    lengths: Lengths | None
    state: ChannelState

    def __getstate__(self) -> dict[str, Any]:
        """A function of items may be a lambda, or one of the script itself, which pickle does not take."""
        lengths = cloudpickle.dumps(self.lengths) if callable(self.lengths) else self.lengths
        return {**self.__dict__, "lengths": lengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        lengths = state["lengths"]
        self.__dict__.update(state, lengths=pickle.loads(lengths) if isinstance(lengths, bytes) else lengths)


def saved(channel: OpenChannel) -> SavedChannel:
    """The channel as it is now, with all its bytes.

    Raises:
        ChannelError: bytes of it cannot be read.
    """
    card = channel.card
    for _ in range(_ATTEMPTS):
        state = channel.service.state()
        try:
            whole = _with_payloads(state, lambda payload: _as_bytes(channel.transport, payload))
        except FetchFailed:  # it was delivered, or lost, since: the next state does not have it
            continue
        return SavedChannel(card.name, card.handoff, card.lengths, whole)
    raise ChannelError(
        f"channel {card.name!r} cannot be saved: the bytes of some items cannot be read; take once more, so that what "
        "is lost is told, and save again",
        channel=card.name,
    )


def loaded(saved: SavedChannel, transport: Backend) -> ChannelHome:
    """The machine of a channel that goes on from there; this process has all its bytes."""
    state = _with_payloads(saved.state, lambda data: pack(_LOADED, transport, decode(data)).payload)
    return ChannelHome.load(state, HOME)


def _as_bytes(transport: Backend, payload: Any) -> bytes:
    if isinstance(payload, bytes):
        return payload
    return encode(unpack(transport, payload, Policy.VIEW)).to_bytes()


def _with_payloads(state: ChannelState, convert: Callable[[Any], Any]) -> ChannelState:
    entries = tuple(
        replace(entry, item=replace(entry.item, payload=_converted(entry.item.payload, convert)))
        for entry in state.ledger.entries
    )
    return replace(state, ledger=replace(state.ledger, entries=entries))


def _converted(payload: Any, convert: Callable[[Any], Any]) -> Any:
    changed = convert(bare(payload))
    return replace(payload, payload=changed) if isinstance(payload, Measured) else changed
