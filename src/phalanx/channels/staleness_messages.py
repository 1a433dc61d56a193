"""What the machine of bounded staleness is told, and what it answers.

Producers, the trainer and engines -> events -> `Staleness.handle` -> instructions -> the link
(`runtime/links/staleness.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Begin:
    """A producer wants to generate `rows` rows. `deadline` is a time of the caller's clock in seconds, None waits."""

    ticket: Hashable
    rows: int
    deadline: float | None = None


@dataclass(frozen=True)
class Cancel:
    """Whoever sent `ticket` waits no longer."""

    ticket: Hashable


@dataclass(frozen=True)
class Accept:
    """`rows` rows of the lease are ready to be trained on; `versions` are those of their first tokens, one for
    all or one for each."""

    lease: int
    rows: int
    versions: int | Sequence[int]


@dataclass(frozen=True)
class Drop:
    """`rows` rows of the lease will never be: filtered, aborted, failed. The reason is counted and shown."""

    lease: int
    rows: int
    reason: str


@dataclass(frozen=True)
class End:
    """The lease ends; what it did not accept is dropped."""

    lease: int
    reason: str = "not accepted"


@dataclass(frozen=True)
class Discard:
    """Rows that were accepted will not be trained on (filtered later, or lost with a process).

    They are rows `start` to `stop` of those that the lease accepted, counted from 0 in the order of acceptance.
    """

    lease: int
    start: int
    stop: int
    reason: str


@dataclass(frozen=True)
class Advance:
    """Version `version` is in training now.

    `trained` rows were trained on since the last advance; None: `rows_per_version` for each version, or all there
    are. Where versions are skipped, each of them is taken to have had its `rows_per_version`. `serving` False:
    engines still generate with the version before, until `Serve`.
    """

    version: int
    trained: int | None = None
    serving: bool = True


@dataclass(frozen=True)
class Serve:
    """New rows are generated with `version` from now on."""

    version: int


@dataclass(frozen=True)
class Tick:
    """Time passed: requests past their deadline are answered."""


Event = Begin | Cancel | Accept | Drop | End | Discard | Advance | Serve | Tick


@dataclass(frozen=True)
class Begun:
    """To the producer: generate; its rows count as running. New rows have `version`."""

    ticket: Hashable
    lease: int
    version: int


@dataclass(frozen=True)
class Expired:
    """To the producer: the deadline passed. `behind` says what it waited for, in words."""

    ticket: Hashable
    behind: str


@dataclass(frozen=True)
class Withdrawn:
    """To whoever cancelled; `waited` False: it had been answered before, and has a lease to end."""

    ticket: Hashable
    waited: bool


@dataclass(frozen=True)
class Accepted:
    """To the producer: these rows, by their places in the `Accept`, may go to the trainer."""

    lease: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Refused:
    """To the producer: these rows, by place, are not accepted.

    `why` is "stale": they would be trained on more than `max_lag` versions behind, and were dropped; or "ended":
    so is the lease (aborted, or from before a restore), and they had been dropped with it.
    """

    lease: int
    places: tuple[int, ...]
    why: Literal["stale", "ended"]


@dataclass(frozen=True)
class Evicted:
    """To the link: accepted rows became too old before they were trained on, and were dropped.

    Only where fewer rows were trained on than `rows_per_version`. Take rows `start` to `stop` of those that the
    lease accepted, counted from 0 in the order of acceptance, out of the channel.
    """

    lease: int
    start: int
    stop: int


@dataclass(frozen=True)
class Overdue:
    """To the link, once: rows of this lease whose first token is of the version it began with are too old now.

    Abort them and `End` the lease: they use the engines in vain.
    """

    lease: int


@dataclass(frozen=True)
class Dropped:
    """To the link: so many rows of the lease count no more, and why."""

    lease: int
    rows: int
    reason: str


Instruction = Begun | Expired | Withdrawn | Accepted | Refused | Evicted | Overdue | Dropped
