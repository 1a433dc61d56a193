"""Exceptions that are hard to send: with other arguments than their text, frozen, with slots, or without a text."""

from __future__ import annotations

import dataclasses


class OtherArguments(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int
    where: str = "here"


class Slotted(ValueError):
    __slots__ = ("_hidden", "code")

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def decode_error() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte")
