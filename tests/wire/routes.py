"""The ways in which an encoded value reaches its reader."""

from __future__ import annotations

import pickle
from typing import Any

from phalanx.wire.codec import Encoded, decode, encode


class Token:
    """Stands for something that lives elsewhere."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise TypeError("a Token never travels itself")


def through_bytes(value: Any, **options: Any) -> Any:
    return decode(encode(value, **options).to_bytes())


def through_buffers(value: Any, **options: Any) -> Any:
    """As an object store does it: out-of-band buffers, given back as read-only memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(encode(value, **options), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[memoryview(bytes(buffer)) for buffer in buffers])


def through_pickle(value: Any, **options: Any) -> Any:
    return pickle.loads(pickle.dumps(encode(value, **options), protocol=5))


def through_old_pickle(value: Any, **options: Any) -> Any:
    return pickle.loads(pickle.dumps(encode(value, **options), protocol=4))


def in_process(value: Any, **options: Any) -> Any:
    return decode(encode(value, **options))


ROUTES = [through_bytes, through_buffers, through_pickle, through_old_pickle, in_process]


def payload(encoded: Encoded) -> int:
    """Bytes of the buffers of a value."""
    return sum(buffer.nbytes for buffer in encoded.buffers)
