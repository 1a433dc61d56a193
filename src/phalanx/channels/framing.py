"""Messages over a stream of bytes: each is its length in 8 bytes and a pickle."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")


def framed(what: Any) -> bytes:
    """A value as one message."""
    data = pickle.dumps(what, 5)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Takes bytes as they come and gives the messages that are whole."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pickles of the messages that ``data`` completes."""
        self._bytes += data
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            begin = at + _LENGTH.size
            if len(self._bytes) < begin + length:
                break
            at = begin + length
            yield bytes(self._bytes[begin:at])
        del self._bytes[:at]

    @property
    def waiting(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._bytes)
