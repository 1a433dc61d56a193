"""How a decoded value arrives: in what memory, on which device, with which objects restored."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from phalanx.wire.value import Value

__all__ = ["DecodeOptions", "Meter", "Policy", "current_arrival", "decoding", "received"]


class Policy(enum.Enum):
    """What memory a decoded tensor or array lies in."""

    PRIVATE = "private"
    """Own, writable memory; large pieces in huge pages."""

    READONLY = "readonly"
    """The encoded bytes themselves, without a copy. Arrays are not writeable. Torch has no read-only tensors:
    whoever writes to one changes what every other reader of the same object sees."""

    VIEW = "view"
    """As READONLY, without any promise: for code that copies at once, such as a gather."""


class Meter:
    """Adds up the bytes that are decoded, of heads and buffers; ``tell`` hears of each value."""

    def __init__(self, tell: Callable[[int], None] | None = None) -> None:
        self.nbytes = 0
        self._tell = tell

    def add(self, nbytes: int) -> None:
        """Count one value."""
        self.nbytes += nbytes
        if self._tell is not None:
            self._tell(nbytes)

    def passed_over(self, nbytes: int) -> None:
        """Take back bytes of a value that were mapped with it and are not read."""
        self.nbytes -= nbytes


received = Meter()
"""Bytes decoded by this process. Of a stored output, only the rows that are read count."""


class DecodeOptions(NamedTuple):
    """The settings of a `decoding` block."""

    policy: Policy = Policy.PRIVATE
    restore: Callable[[Any], Any] | None = None
    device: Any = None
    every_tensor: bool = False
    meter: Meter | None = None

    def policy_for(self, sent: Policy | None) -> Policy:
        """The policy for what was sent with ``sent``: read-only wins over private, a view over both."""
        return Policy.READONLY if sent is Policy.READONLY and self.policy is Policy.PRIVATE else self.policy


_DEFAULT = DecodeOptions()
_arrival: ContextVar[DecodeOptions] = ContextVar("phalanx_arrival", default=_DEFAULT)


def current_arrival() -> DecodeOptions:
    """The settings of the innermost `decoding` block of this thread or task."""
    return _arrival.get()


class decoding:
    """Say how everything that is decoded inside arrives, in this thread or asyncio task only.

    ``restore(token)`` gives the object for a hoisted token (None: the token itself). ``device`` is where
    tensors go that lay on an accelerator when they were sent; with ``every_tensor``, all tensors. None leaves
    them on the CPU. Arrays always stay on the CPU. ``meter`` counts what is decoded.
    """

    __slots__ = ("_settings", "_token")
    _token: Token[DecodeOptions]

    def __init__(
        self,
        policy: Policy = Policy.PRIVATE,
        *,
        restore: Callable[[Any], Any] | None = None,
        device: Value = None,
        every_tensor: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self._settings = DecodeOptions(policy, restore, device, every_tensor, meter)

    def __enter__(self) -> None:
        self._token = _arrival.set(self._settings)

    def __exit__(self, *_: object) -> None:
        _arrival.reset(self._token)
