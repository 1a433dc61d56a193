"""Routes of encoded values from encoder to decoder."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import pytest

from phalanx.wire.codec import Encoded, decode, encode

Pair = namedtuple("Pair", "left right")


class Token:
    """An object that is sent as a placeholder only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise TypeError("a Token never travels itself")


def through_bytes(value: Any, **options: Any) -> Any:
    return decode(encode(value, **options).to_bytes())


def through_buffers(value: Any, **options: Any) -> Any:
    """Pass buffers out of band and return them as read-only memory, as an object store does."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(encode(value, **options), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[memoryview(bytes(buffer)) for buffer in buffers])


def through_pickle(value: Any, **options: Any) -> Any:
    return pickle.loads(pickle.dumps(encode(value, **options), protocol=5))


def in_process(value: Any, **options: Any) -> Any:
    return decode(encode(value, **options))


by_every_route = pytest.mark.parametrize(
    "route", [through_bytes, through_buffers, through_pickle, in_process], ids=lambda route: route.__name__
)


def payload(encoded: Encoded) -> int:
    """Return the bytes of the buffers of a value."""
    return sum(buffer.nbytes for buffer in encoded.buffers)
