"""What the home of a channel answers, as values and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phalanx.channels.batch import Batch, lost
from phalanx.channels.numbers import whole_number
from phalanx.channels.payloads import Lengths
from phalanx.channels.services import shown
from phalanx.errors import ChannelClosed, ChannelEmpty, ChannelError, ChannelFull, DeclarationError

_REFUSED = {
    "finished": "it was finished: nothing more is put",
    "closed": "it was closed",
    "producer closed": "this process has left it and puts no more",
    "producer gone": "this process was taken for gone",
}


def closed(channel: str, why: str) -> ChannelClosed:
    """The error of a channel that is over."""
    return ChannelClosed(f"channel {channel!r}: {why}; nothing can be put or taken", channel=channel)


def accepted_number(channel: str, limit: str, what: Any) -> int:
    """The number of the item that was put.

    Raises:
        ChannelFull, ChannelClosed: it was refused.
    """
    kind, *rest = what
    if kind == "accepted":
        return rest[0]
    if kind == "refused" and rest[0] == "full":
        raise ChannelFull(
            f"channel {channel!r}: no room for the item in time: at most {limit} may wait; take faster, give put() a "
            "longer timeout=, or the channel a larger maxsize",
            channel=channel,
        )
    raise closed(channel, _REFUSED[rest[0]] if kind == "refused" else rest[0])


def untaken(channel: str, what: Any, items: int | None, rows: int | None) -> ChannelError:
    """Why nothing was taken."""
    match what:
        case ("lost", losses):
            return lost(channel, losses)
        case ("expired", there, rows_there):
            wanted = f"{items} items" if items is not None else f"{rows} rows"
            return ChannelEmpty(
                f"channel {channel!r}: {wanted} were asked for, and in time there were {there} items with {rows_there} "
                "rows; ask for fewer or wait longer. Nothing was taken",
                channel=channel,
            )
        case ("unfit", number, producer):
            return ChannelError(
                f"channel {channel!r}: {rows} rows were asked for, but item {number}, put by {shown(producer)}, is not "
                "made of rows; take items by take(n) or get(), or put tensors, arrays, lists, or structures of such "
                "with equally many rows",
                channel=channel,
            )
        case _:
            return closed(channel, what[1])


def check_order(channel: str, lengths: Lengths | None, pieces: int | None, sort: bool) -> None:
    """Whether rows can be ordered so.

    Raises:
        DeclarationError: the channel knows no lengths, both ways were asked for, or there are no such pieces.
    """
    if pieces is not None:
        at_least_one(pieces, "take_rows(balance=)")
    if pieces is not None and sort:
        raise DeclarationError(
            f"channel {channel!r}: take_rows(balance={pieces}, sort=True): give one of the two"
        )
    if lengths is None and (sort or pieces is not None):
        asked = "sort=True" if sort else f"balance={pieces}"
        raise DeclarationError(
            f"channel {channel!r}: take_rows({asked}) needs the length of each row; make the channel with "
            "px.Channel(lengths=<a key of the items, or a function of one>)"
        )


def ordered(batch: Batch, pieces: int | None, sort: bool) -> Batch:
    """The batch in ascending order, or in one in which even pieces are about equally long, if that was asked for.

    Raises:
        DispatchError: a length is below 0, and pieces are to be equally long; the batch is given back.
    """
    try:
        if sort:
            batch.sort()
        elif pieces is not None:
            batch.balance(pieces)
    except BaseException:
        batch.give_back()
        raise
    return batch


def at_least_one(n: Any, verb: str) -> int:
    """How many were asked for.

    Raises:
        DeclarationError: that is no number of items or rows.
    """
    number = whole_number(n)
    if number is None or number < 1:
        raise DeclarationError(f"Channel.{verb}: {n!r} was given; expected how many, a whole number from 1")
    return number


def to_drop(reason: Any, numbers: Iterable[Any] | None) -> tuple[Any, ...]:
    """What is asked of the home: to drop these items, or all that wait.

    Raises:
        DeclarationError: one of the numbers is none.
    """
    if numbers is None:
        return (str(reason),)
    found = tuple(map(whole_number, numbers))
    if None in found:
        raise DeclarationError("Channel.drop(numbers=): expected numbers of items, as put() gives them")
    return str(reason), found
