"""What is put into a channel: small things as bytes that lie at its home, all else in the store of who put them."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple

from phalanx.backends.api import Backend
from phalanx.backends.backend_types import Ref
from phalanx.calls.store_quota import Room
from phalanx.config import settings
from phalanx.dispatch.split import count_rows
from phalanx.errors import DispatchError
from phalanx.wire.codec import Policy, decode, decoding, encode
from phalanx.wire.value import Value

#: Of this process, among all of the run.
PROCESS = secrets.token_hex(8)
_keys = itertools.count()


class InStore(NamedTuple):
    """Bytes that a process keeps: ``key`` is its own name for them, ``address`` where others find them."""

    process: str
    key: int
    address: Any


Lengths = str | Callable[[Any], Any]


class Packed(NamedTuple):
    """A value that is ready to be put. ``rows`` is None where it is not made of rows.

    ``lengths`` are numbers by row, by which batches are balanced.
    """

    payload: bytes | InStore
    nbytes: int
    rows: int | None
    lengths: tuple[float, ...] | None = None


class Kept:
    """What this process put and nobody has let go of yet, by channel; it keeps the bytes alive."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[str, Ref]] = {}
        self._lock = threading.Lock()

    def keep(self, channel: str, transport: Backend, ref: Ref) -> InStore:
        """Keep what was stored, for others to find."""
        key = next(_keys)
        with self._lock:
            self._refs[key] = (channel, ref)
        return InStore(PROCESS, key, transport.address_of(ref))

    def drop(self, keys: Iterable[int]) -> None:
        """Let go of some."""
        with self._lock:
            for key in keys:
                self._refs.pop(key, None)

    def drop_all(self, channel: str) -> None:
        """Let go of all of a channel."""
        with self._lock:
            self._refs = {key: kept for key, kept in self._refs.items() if kept[0] != channel}

    def get(self, key: int) -> Ref | None:
        """The reference to what is kept under a key."""
        found = self._refs.get(key)
        return None if found is None else found[1]

    def count(self, channel: str) -> int:
        """How many of a channel are kept."""
        with self._lock:
            return sum(kept[0] == channel for kept in self._refs.values())


kept = Kept()


def pack(channel: str, transport: Backend, value: Value, lengths: Lengths | None = None) -> Packed:
    """Encode a value, and store it here if it is large; ``lengths`` says where the length of each row is found.

    Raises:
        DispatchError: it cannot be pickled, or the store of this node has no room for it.
    """
    encoded = encode(value)
    rows = rows_of(value)
    found = None if lengths is None else lengths_of(value, lengths, rows)
    if encoded.nbytes <= settings().inline_bytes:
        return Packed(encoded.to_bytes(), encoded.nbytes, rows, found)
    Room(transport).admit(encoded.nbytes, encoded.nbytes, "the item put into a channel takes")
    return Packed(kept.keep(channel, transport, transport.put(encoded)), encoded.nbytes, rows, found)


def rows_of(value: Value) -> int | None:
    """The rows of an item; None for one that is not made of rows, or not of equally many in all its parts."""
    try:
        return count_rows(value)
    except DispatchError:
        return None


def lengths_of(value: Any, lengths: Lengths, rows: int | None) -> tuple[float, ...]:
    """The length of each row of an item.

    Raises:
        DispatchError: there is not one number for each row.
    """
    if callable(lengths):
        found = lengths(value)
    else:
        try:
            found = value[lengths]
        except (KeyError, IndexError, TypeError):
            raise DispatchError(
                f"Channel.put: an item of type {type(value).__name__} has nothing under the key {lengths!r}, by which "
                "the channel looks up lengths of rows; put it in, or give the channel lengths=<a function of an item>"
            ) from None
    numbers = found.tolist() if hasattr(found, "tolist") else list(found)
    if len(numbers) != rows or not all(_is_number(number) for number in numbers):
        raise DispatchError(
            f"Channel.put: lengths={lengths!r} of the channel gives {len(numbers)} values for an item of {rows} rows; "
            "expected one finite number for each row"
        )
    return tuple(numbers)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def unpacked_ref(transport: Backend, payload: InStore) -> Ref:
    """The reference to an item's bytes."""
    own = kept.get(payload.key) if payload.process == PROCESS else None
    return own if own is not None else transport.at(payload.address)


def unpack(transport: Backend, payload: bytes | InStore, policy: Policy = Policy.PRIVATE) -> Value:
    """The value, here.

    Raises:
        FetchFailed: the process that had its bytes is gone.
    """
    with decoding(policy):
        if isinstance(payload, bytes):
            return decode(payload)
        return transport.fetch([unpacked_ref(transport, payload)])[0]
