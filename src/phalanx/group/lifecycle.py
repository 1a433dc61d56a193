"""The life of a group as a table of transitions. No IO, no clock, no threads.

    starting ---started--> ready ---restart--> restarting ---started--> ready
        '------break-----> broken <---break---' |
                             '------restart-----'
    ready ---members--> ready, as the next epoch
    ready, broken ---told--> ready, of a view elsewhere, once the owner has given the group other ranks
    close leads from every state to closing, closed from there to closed.

Everything that changes the state of a group is an event given to `Lifecycle.handle`, and everything that an
event may do is a line of `TRANSITIONS`. `GroupLife` hands it the events that calls, restarts and closes make, one at
a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from phalanx.errors import (
    DispatchError,
    GroupBroken,
    GroupClosed,
    InternalError,
    PhalanxError,
    StaleEpoch,
)

__all__ = [
    "TRANSITIONS",
    "BreakEvent",
    "CloseEvent",
    "ClosedEvent",
    "Event",
    "Lifecycle",
    "MembersEvent",
    "RestartEvent",
    "StartedEvent",
    "State",
    "Step",
    "ToldEvent",
]

_STORY_LENGTH = 50


class State(Enum):
    """Where a group is in its life."""

    STARTING = "starting"
    READY = "ready"
    BROKEN = "broken"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True)
class StartedEvent:
    """All ranks of an epoch have been constructed (after a restart: and their calls replayed)."""

    epoch: int


@dataclass(frozen=True)
class BreakEvent:
    """A failure after which the ranks of an epoch cannot work together: one is lost, or was stopped."""

    epoch: int
    cause: PhalanxError


@dataclass(frozen=True)
class RestartEvent:
    """Somebody, or a policy, wants the ranks anew; a new epoch begins."""


@dataclass(frozen=True)
class MembersEvent:
    """Ranks come or go while the others work on; a new epoch begins."""


@dataclass(frozen=True)
class ToldEvent:
    """A view learnt which ranks the group has in an epoch that its owner, in another process, has begun."""

    epoch: int


@dataclass(frozen=True)
class CloseEvent:
    """Somebody wants the group gone."""


@dataclass(frozen=True)
class ClosedEvent:
    """Nothing of the group is left."""


Event = StartedEvent | BreakEvent | RestartEvent | MembersEvent | ToldEvent | CloseEvent | ClosedEvent


@dataclass(frozen=True)
class Step:
    """One event and what it did. `epoch` is the one in force afterwards; `stale` events did nothing."""

    before: State
    event: Event
    after: State
    epoch: int
    stale: bool = False

    def __str__(self) -> str:
        ignored = ", ignored: of an older epoch" if self.stale else ""
        return (
            f"{self.before.value} --{_told(self.event)}--> {self.after.value} (epoch {self.epoch}{ignored})"
        )


#: The state after each event; a pair that is not here is a bug of whoever sent the event.
TRANSITIONS: Mapping[tuple[State, type[Event]], State] = MappingProxyType(
    {
        (State.STARTING, StartedEvent): State.READY,
        (State.RESTARTING, StartedEvent): State.READY,
        (State.STARTING, BreakEvent): State.BROKEN,
        (State.READY, BreakEvent): State.BROKEN,
        (State.RESTARTING, BreakEvent): State.BROKEN,
        # More ranks fail after the first one, and while the group is being taken down.
        (State.BROKEN, BreakEvent): State.BROKEN,
        (State.CLOSING, BreakEvent): State.CLOSING,
        (State.CLOSED, BreakEvent): State.CLOSED,
        (State.READY, RestartEvent): State.RESTARTING,
        (State.BROKEN, RestartEvent): State.RESTARTING,
        (State.READY, MembersEvent): State.READY,
        (State.READY, ToldEvent): State.READY,
        (State.BROKEN, ToldEvent): State.READY,
        (State.STARTING, CloseEvent): State.CLOSING,
        (State.READY, CloseEvent): State.CLOSING,
        (State.BROKEN, CloseEvent): State.CLOSING,
        (State.RESTARTING, CloseEvent): State.CLOSING,
        # close() may be called any number of times, from any number of threads.
        (State.CLOSING, CloseEvent): State.CLOSING,
        (State.CLOSED, CloseEvent): State.CLOSED,
        # The start, or a restart, that was under way when the group was closed.
        (State.CLOSING, StartedEvent): State.CLOSING,
        (State.CLOSED, StartedEvent): State.CLOSED,
        (State.CLOSING, ClosedEvent): State.CLOSED,
    }
)


class Lifecycle:
    """State, epoch and cause of one group. Changed by `handle` alone.

    `cause` is the first failure of the epoch that broke: set while broken, kept through restarting and
    closing, gone once the group is ready again.
    """

    def __init__(self, group: str, *, epoch: int = 0) -> None:
        self._group = group
        self.state = State.STARTING
        self._epoch = epoch
        self._cause: PhalanxError | None = None
        self._story: deque[Step] = deque(maxlen=_STORY_LENGTH)
        #: What else whoever calls a broken group should know, such as why it was not restarted.
        self.remark = ""
        #: Why it is closed and what to do, where that was not somebody's close().
        self.closed_because = ""

    @property
    def epoch(self) -> int:
        """Counts the rosters that the group has had: one more with each restart, and each change of its members."""
        return self._epoch

    @property
    def cause(self) -> PhalanxError | None:
        return self._cause

    @property
    def story(self) -> tuple[Step, ...]:
        """The last events and what they did, oldest first."""
        return tuple(self._story)

    def handle(self, event: Event) -> Step:
        """Take one event. What an older epoch still reports is noted and does nothing.

        Raises:
            InternalError: the event cannot happen in this state; nothing has changed.
        """
        told_epoch = event.epoch if isinstance(event, StartedEvent | BreakEvent) else self._epoch
        if told_epoch < self._epoch:
            return self._note(Step(self.state, event, self.state, self._epoch, stale=True))
        after = TRANSITIONS.get((self.state, type(event)))
        if after is None or told_epoch > self._epoch:
            raise self._illegal(event)
        epoch = self._epoch + isinstance(event, RestartEvent | MembersEvent)
        step = Step(self.state, event, after, event.epoch if isinstance(event, ToldEvent) else epoch)
        self._cause = self._cause_after(event, after)
        self.state, self._epoch = step.after, step.epoch
        return self._note(step)

    def check_callable(self) -> None:
        """Say whether a call may be made now.

        Raises:
            GroupClosed: the group is closed or closing.
            GroupBroken: with the first cause; also while the group is being restarted.
            DispatchError: the group is still starting.
        """
        if self.state is State.READY:
            return
        if self.state in (State.CLOSING, State.CLOSED):
            raise GroupClosed(
                f"group {self._group!r} is {self.state.value}: a call was made on it, but a closed group "
                f"takes none. {self.closed_because or 'Make the group anew, or call it before close().'}",
                group=self._group,
            )
        if self.state is State.BROKEN:
            raise self.broken_error()
        if self.state is State.RESTARTING:
            raise self._being_restarted()
        raise DispatchError(
            f"group {self._group!r} is still starting: a call was made before its ranks were ready. Wait "
            "until WorkerGroup(...) has returned."
        )

    def _cause_after(self, event: Event, after: State) -> PhalanxError | None:
        if after is State.READY:
            return None
        # Broken by a failed restart: that failure, not the one before it. Otherwise the first one stays.
        fresh = self._cause is None or self.state is State.RESTARTING
        if isinstance(event, BreakEvent) and after is State.BROKEN and fresh:
            return event.cause
        return self._cause

    def _note(self, step: Step) -> Step:
        self._story.append(step)
        return step

    def _illegal(self, event: Event) -> InternalError:
        return InternalError(
            f"group {self._group!r}, {self.state.value} in epoch {self._epoch}, was told {_told(event)}, "
            "which cannot happen there; what happened before:",
            story=tuple(str(step) for step in self._story),
        )

    def stale_error(self, epoch: int, method: str) -> StaleEpoch:
        """What a call gets whose ranks are other processes by now, or gone."""
        return StaleEpoch(
            f"group {self._group!r} was restarted, or has other ranks by now: this call of {method} belongs to epoch "
            f"{epoch}, the group is in epoch {self._epoch}; make the call again",
            group=self._group,
            epoch=epoch,
            current=self._epoch,
        )

    def changing_error(self, method: str) -> StaleEpoch:
        """What a call of a view gets whose ranks the owner has ended, and has not followed by others yet."""
        return StaleEpoch(
            f"group {self._group!r}: its owner, in another process, has ended ranks of this call of {method}, to "
            "give the group other ones; make the call again once it has",
            group=self._group,
            epoch=self._epoch,
            current=self._epoch,
        )

    def broken_error(self) -> GroupBroken:
        """What a call on a broken group gets: with the cause, and what to do."""
        return GroupBroken(
            f"group {self._group!r} is broken by an earlier failure and takes no calls. restart() makes its "
            f"ranks anew, px.replace_ranks(group) those that are lost, close() frees them. "
            f"{self.remark + ' ' if self.remark else ''}"
            f"The failure was: {_first_line(self._cause)}",
            group=self._group,
            cause=self._cause,
        )

    def _being_restarted(self) -> GroupBroken:
        why = f" after: {_first_line(self._cause)}" if self._cause is not None else "."
        return GroupBroken(
            f"group {self._group!r} is being restarted and takes no calls until restart() has returned{why}",
            group=self._group,
            cause=self._cause,
        )


def _told(event: Event) -> str:
    name = type(event).__name__.removesuffix("Event").lower()
    if isinstance(event, BreakEvent):
        return f"{name} of epoch {event.epoch}: {_first_line(event.cause)}"
    return f"{name} of epoch {event.epoch}" if isinstance(event, StartedEvent) else name


def _first_line(cause: PhalanxError | None) -> str:
    return str(cause).partition("\n")[0] or type(cause).__name__
