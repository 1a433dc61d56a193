"""What a channel's home is told, and what it answers.

Producers, consumers and watchers of processes -> events -> `ChannelHome.handle` -> instructions -> the link
(`runtime/links/channel.py`), which replies to whoever sent the ticket, moves bytes, and frees them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.channels.channel_items import Item, Part

Refusal = Literal["full", "finished", "closed", "producer closed", "producer gone"]


@dataclass(frozen=True)
class Put:
    """A producer offers one item.

    `ticket` names the request, no other that waits has it. `deadline` is a time of the caller's clock in seconds:
    None waits as long as it takes, one that is not in the future refuses at once if there is no room.
    """

    ticket: Hashable
    producer: str
    payload: Any = field(repr=False, compare=False)
    nbytes: int = 0
    rows: int | None = None
    deadline: float | None = None
    holder: str | None = None
    """The process that has the bytes, if that is not the producer."""

    def __post_init__(self) -> None:
        if self.nbytes < 0 or (self.rows is not None and self.rows < 0):
            raise ValueError(f"an item of {self.nbytes} bytes and {self.rows} rows: give 0 or more of each")


@dataclass(frozen=True)
class Take:
    """A consumer asks for `items` items, or for `rows` rows out of items of any size: one of the two.

    `deadline` as in `Put`: one that is not in the future takes what it asked for now, or nothing.
    """

    ticket: Hashable
    consumer: str
    items: int | None = None
    rows: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        wanted = [count for count in (self.items, self.rows) if count is not None]
        if len(wanted) != 1 or wanted[0] < 1:
            raise ValueError(
                f"a take of items={self.items}, rows={self.rows}: give one of the two, a number from 1 up"
            )


@dataclass(frozen=True)
class Cancel:
    """Whoever sent `ticket` waits no longer."""

    ticket: Hashable


@dataclass(frozen=True)
class Ack:
    """What was given under `lease` is delivered."""

    lease: int


@dataclass(frozen=True)
class GiveBack:
    """What was given under `lease` goes back to the front, in order; the items in `unreadable` are lost."""

    lease: int
    unreadable: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Drop:
    """Let go of what waits: all of it, or the items of these numbers. `reason` is counted and shown."""

    ticket: Hashable
    reason: str
    numbers: frozenset[int] | None = None


@dataclass(frozen=True)
class Gone:
    """A process ended, `why` in words. Its bytes, leases and requests end with it."""

    process: str
    why: str


@dataclass(frozen=True)
class CloseProducer:
    """The process puts no more, and wants to end: after its items are delivered (drain), or once the home has
    their bytes (`handoff`)."""

    producer: str
    handoff: bool = False


@dataclass(frozen=True)
class Moved:
    """`holder` has the bytes of these items now: their numbers, with new payloads."""

    holder: str
    payloads: Mapping[int, Any]


@dataclass(frozen=True)
class Finish:
    """Nothing new is put from now on; takers get what is there, then `Ended`."""


@dataclass(frozen=True)
class Close:
    """The channel ends: what waits is dropped, and every request answered."""

    reason: str = "closed"


@dataclass(frozen=True)
class Tick:
    """Time passed: requests past their deadline are answered."""


Event = Put | Take | Cancel | Ack | GiveBack | Drop | Gone | CloseProducer | Moved | Finish | Close | Tick


@dataclass(frozen=True)
class Loss:
    """What went with one process: `items` (some or all rows of which), `rows`, and `puts` that still waited."""

    holder: str
    why: str
    items: int = 0
    rows: int = 0
    puts: int = 0


@dataclass(frozen=True)
class Accepted:
    """To the producer: the item is in, as `number`."""

    ticket: Hashable
    number: int


@dataclass(frozen=True)
class Refused:
    """To the producer: the item is not in, and nothing of it is kept."""

    ticket: Hashable
    why: Refusal


@dataclass(frozen=True)
class Given:
    """To the consumer: these parts, in order, until it acknowledges the lease or gives it back.

    Fewer than it asked for only where `short`: the channel was finished.
    """

    ticket: Hashable
    lease: int
    parts: tuple[Part, ...]
    short: bool = False


@dataclass(frozen=True)
class Expired:
    """To the consumer: the deadline passed with only `items` items, `rows` rows waiting. Nothing was taken."""

    ticket: Hashable
    items: int
    rows: int


@dataclass(frozen=True)
class Unfit:
    """To the consumer: it asked for rows, and `item` is not made of rows. Nothing was taken."""

    ticket: Hashable
    item: Item


@dataclass(frozen=True)
class Lost:
    """To the consumer: raise this once. Nothing was taken."""

    ticket: Hashable
    losses: tuple[Loss, ...]


@dataclass(frozen=True)
class Ended:
    """To the consumer: there is nothing left, and nothing will come. `why` is "finished", or that of `Close`."""

    ticket: Hashable
    why: str


@dataclass(frozen=True)
class Withdrawn:
    """To whoever cancelled: the request waits no longer, and changed nothing.

    `waited` False: it had been answered before; a consumer then gives back the lease it got.
    """

    ticket: Hashable
    waited: bool


@dataclass(frozen=True)
class LeaseOver:
    """To the consumer: this lease had ended (given back because its process was taken for gone, say)."""

    lease: int


@dataclass(frozen=True)
class Dropped:
    """To whoever asked for it: so much was dropped."""

    ticket: Hashable
    items: int
    rows: int


@dataclass(frozen=True)
class Freed:
    """To the link: nothing of these items is under way; their holders may let go of the bytes.

    `end` is what became of the rest of them.
    """

    items: tuple[Item, ...]
    end: Literal["delivered", "dropped", "lost"] = "delivered"


@dataclass(frozen=True)
class HandOver:
    """To the link: copy the bytes of these items to the home, then say `Moved`."""

    producer: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Unneeded:
    """To the link: these items had ended before they were moved; `holder` lets go of the copies."""

    holder: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Released:
    """To the producer: the channel needs nothing of this process any more."""

    producer: str


Instruction = (
    Accepted
    | Refused
    | Given
    | Expired
    | Unfit
    | Lost
    | Ended
    | Withdrawn
    | LeaseOver
    | Dropped
    | Freed
    | HandOver
    | Unneeded
    | Released
)
