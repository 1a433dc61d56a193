"""Payloads of items: small values as bytes at the hub, large values in the store of the process that put them.

A producer that ends waits for the delivery of its large items, or moves their bytes to the hub.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from phalanx.backends.backend_types import Backend, FetchFailed, Ref
from phalanx.calls.values import StoreQuota
from phalanx.channels.hub import Packed, Payload, StoredPayload
from phalanx.channels.hub_client import PROCESS, HubClient, HubObject, stored_items
from phalanx.channels.staleness_state import Gone
from phalanx.declare.context import current_context
from phalanx.dispatch.split import count_rows
from phalanx.errors import DispatchError
from phalanx.wire.codec import decoding, encode
from phalanx.wire.value import Value
from phalanx.worker.exit_hooks import ExitHooks, current_closers

_CLOSES_WITHIN_S = 4.0  # less than the time in which a rank has to close
_LEAVES_WITHIN_S = 60.0  # less than the time in which a rank has to leave a group that continues
_LOOKS_EVERY_S = 0.05
_numbers = itertools.count()

Lengths = str | Callable[[Any], Any]


def pack(channel: HubObject, value: Value, lengths: Lengths | None = None) -> Packed:
    """Encode a value, and store it if it is large. ``lengths`` locates the lengths of the rows.

    Raises:
        DispatchError: if the value cannot be pickled, its rows have no valid lengths, or the store of this node has no
            capacity for it.
    """
    encoded = encode(value)
    rows = None
    with contextlib.suppress(DispatchError):  # parts with different numbers of rows: not made of rows
        rows = count_rows(value)
    numbers = row_lengths(channel, value, lengths, rows)
    client = channel._client()
    if encoded.nbytes <= client.inline_bytes:
        return encoded.to_bytes(), encoded.nbytes, rows, numbers
    backend = channel._backend
    quota = StoreQuota(backend)
    quota.admit([encoded.nbytes], "the item put into a channel takes")
    quota.took(encoded.nbytes)
    ref, number = backend.put(encoded), next(_numbers)
    stored_items[number] = client, ref
    return StoredPayload(PROCESS, number, backend.address_of(ref)), encoded.nbytes, rows, numbers


def to_bytes(backend: Backend, payload: Payload) -> bytes:
    """Return a payload as bytes.

    Raises:
        FetchFailed: if the process that stored the bytes died, or is this process and has freed them.
    """
    stored = source(backend, payload)
    if isinstance(stored, bytes):
        return stored
    with decoding(readonly=True):
        value = backend.fetch([stored])[0]
    return encode(value).to_bytes()


def source(backend: Backend, payload: Payload) -> bytes | Ref:
    """Return the bytes of a payload, or the reference to them.

    Raises:
        FetchFailed: if this process stored the bytes, and has freed them: a fetch by their address would never end.
    """
    if isinstance(payload, bytes):
        return payload
    if payload.process != PROCESS:
        return backend.at(payload.address)
    own = stored_items.get(payload.number)
    if own is None:
        raise FetchFailed
    return own[-1]


def row_lengths(
    channel: HubObject, value: Any, lengths: Lengths | None, rows: int | None
) -> tuple[float, ...]:
    """Return the length of each row of an item; none if the channel has no ``lengths``.

    Raises:
        DispatchError: if a length is missing, or is not a finite number.
    """
    if lengths is None:
        return ()
    if callable(lengths):
        given = lengths(value)
    else:
        try:
            given = value[lengths]
        except (KeyError, IndexError, TypeError):
            raise DispatchError(
                f"channel {channel.name!r}: an item of type {type(value).__name__} has no value under the key "
                f"{lengths!r}, where the channel expects the lengths of rows; add it, or create the channel with "
                "lengths=<a function>"
            ) from None
    given = given.tolist() if hasattr(given, "tolist") else given
    numbers: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if len(numbers) != rows or not all(isinstance(each, Real) and math.isfinite(each) for each in numbers):
        raise DispatchError(
            f"channel {channel.name!r}: lengths={lengths!r} gives {given!r:.100} for an item of {rows} rows; expected "
            "one finite number for each row"
        )
    return tuple(int(each) if isinstance(each, Integral) else float(each) for each in numbers)


def leave(client: HubClient, channel: HubObject, handoff: bool, timeout: float | None) -> int:
    """Reject further puts of this process, and wait until the channel needs none of its items.

    With ``handoff``, the bytes of its items are moved to the hub. Return the number of items needed after the timeout.
    """
    limit = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        needed, moved = list[tuple[int, Payload | None]](), False
        with contextlib.suppress(Gone):
            needed = client.request(channel._key, "leave", client.name)
        for number, payload in needed:
            if handoff and payload is not None:
                with contextlib.suppress(FetchFailed):
                    client.send(channel._key, "move", number, to_bytes(channel._backend, payload))
                    moved = True
        if not needed or (time.monotonic() >= limit and not moved):
            return len(needed)
        time.sleep(_LOOKS_EVERY_S)


def leave_at_exit(channel: HubObject, handoff: bool) -> None:
    """Have this rank leave the channel when the rank is closed. Items that are not delivered in time are lost.

    A rank that leaves a group which continues moves its items to the hub, and so does an inline rank, since no
    consumer could take items while it closes.
    """
    closers, context = current_closers(), current_context()
    if closers is None or context is None:
        return
    channels: dict[str, tuple[HubClient, HubObject, bool]] = context.shared.setdefault("channels", {})
    if not channels:
        closers.add(_leave_all, closers, channels.values())
    client = channel._client()
    channels[channel._key] = client, channel, handoff or client.is_local


def _leave_all(closers: ExitHooks, channels: Iterable[tuple[HubClient, HubObject, bool]]) -> None:
    """Leave the channels of a rank, which all have the same time: first those whose items are only moved."""
    limit = time.monotonic() + (_LEAVES_WITHIN_S if closers.leaves else _CLOSES_WITHIN_S)
    for client, channel, handoff in sorted(channels, key=lambda each: not each[2]):
        leave(client, channel, handoff or closers.leaves, limit - time.monotonic())
