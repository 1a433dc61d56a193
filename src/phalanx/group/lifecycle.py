"""The life of a group as a table of transitions. No IO, no clock, no threads.

    starting ---started--> ready ---restart--> restarting ---started--> ready
        '------break-----> broken <---break---' |
                             '------restart-----'
    ready ---members--> ready, as the next epoch
    ready, broken ---follow--> ready, of a view elsewhere, once the owner has given the group other ranks
    close leads from every state to closing, closed from there to closed.

Everything that changes the state of a group is an event passed to `Lifecycle.handle`, and every effect of an event is a
line of `TRANSITIONS`. `Group` passes the events of calls, restarts and closes, one at a time.
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

_STORY_LENGTH = 50


class State(Enum):
    """Where a group is in its life."""

    STARTING = "starting"
    READY = "ready"
    BROKEN = "broken"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


class Event(Enum):
    """Event that may change the state of a group."""

    STARTED = "started"
    """All ranks of an epoch have been constructed (after a restart: and their calls made again)."""
    BREAK = "break"
    """The ranks of an epoch cannot work together any more: a rank was lost, or was stopped."""
    RESTART = "restart"
    """Ranks get new processes, all or some; a new epoch begins."""
    MEMBERS = "members"
    """Ranks come or go while the others work on; a new epoch begins."""
    FOLLOW = "follow"
    """A view learned of an epoch that the group's owner, in another process, has begun."""
    CLOSE = "close"
    """The group is to be closed."""
    CLOSED = "closed"
    """Nothing of the group is left."""


@dataclass(frozen=True)
class Transition:
    """An event and its effect. `epoch` is the number in force afterwards; `stale` events had no effect."""

    before: State
    event: Event
    after: State
    epoch: int
    stale: bool = False
    cause: PhalanxError | None = None

    def __str__(self) -> str:
        ignored = ", ignored: of an older epoch" if self.stale else ""
        what = self.event.value + (f" ({_first_line(self.cause)})" if self.cause is not None else "")
        return f"{self.before.value} --{what}--> {self.after.value} (epoch {self.epoch}{ignored})"


#: The state after each event; a pair that is not here is a bug of the sender of the event.
TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.STARTING, Event.STARTED): State.READY,
        (State.RESTARTING, Event.STARTED): State.READY,
        (State.STARTING, Event.BREAK): State.BROKEN,
        (State.READY, Event.BREAK): State.BROKEN,
        (State.RESTARTING, Event.BREAK): State.BROKEN,
        # More ranks fail after the first one, and while the group is being taken down.
        (State.BROKEN, Event.BREAK): State.BROKEN,
        (State.CLOSING, Event.BREAK): State.CLOSING,
        (State.CLOSED, Event.BREAK): State.CLOSED,
        (State.READY, Event.RESTART): State.RESTARTING,
        (State.BROKEN, Event.RESTART): State.RESTARTING,
        (State.READY, Event.MEMBERS): State.READY,
        (State.READY, Event.FOLLOW): State.READY,
        (State.BROKEN, Event.FOLLOW): State.READY,
        (State.STARTING, Event.CLOSE): State.CLOSING,
        (State.READY, Event.CLOSE): State.CLOSING,
        (State.BROKEN, Event.CLOSE): State.CLOSING,
        (State.RESTARTING, Event.CLOSE): State.CLOSING,
        # close() may be called any number of times, from any number of threads.
        (State.CLOSING, Event.CLOSE): State.CLOSING,
        (State.CLOSED, Event.CLOSE): State.CLOSED,
        # The start, or a restart, that was under way when the group was closed.
        (State.CLOSING, Event.STARTED): State.CLOSING,
        (State.CLOSED, Event.STARTED): State.CLOSED,
        (State.CLOSING, Event.CLOSED): State.CLOSED,
    }
)


class Lifecycle:
    """State, epoch and cause of a group. Changed by `handle` alone.

    `cause` is the first failure of the epoch that broke: set while broken, kept through restarting and
    closing, gone once the group is ready again.
    """

    def __init__(self, group: str, *, epoch: int = 0) -> None:
        self._group = group
        self.state = State.STARTING
        self._epoch = epoch
        self._cause: PhalanxError | None = None
        self._story: deque[Transition] = deque(maxlen=_STORY_LENGTH)
        #: Further information for callers of a broken group, such as why it was not restarted.
        self.remark = ""
        #: Why it is closed and what to do, if it was not closed by a call of close().
        self.closed_because = ""

    @property
    def epoch(self) -> int:
        """Number of the present roster: it grows by 1 with each restart, and each change of the members."""
        return self._epoch

    @property
    def cause(self) -> PhalanxError | None:
        return self._cause

    @property
    def story(self) -> tuple[Transition, ...]:
        """The last events and their effects, oldest first."""
        return tuple(self._story)

    def handle(self, event: Event, epoch: int | None = None, cause: PhalanxError | None = None) -> Transition:
        """Handle an event, and return the transition. Events of an older epoch are recorded and have no effect.

        Args:
            event: what happened.
            epoch: the epoch that it is about, or that is followed; None: the present epoch.
            cause: the failure, of a break.

        Raises:
            InternalError: the event cannot happen in this state; nothing has changed.
        """
        about = self._epoch if epoch is None else epoch
        if about < self._epoch:
            return self._note(Transition(self.state, event, self.state, self._epoch, True, cause))
        after = TRANSITIONS.get((self.state, event))
        if after is None or (about > self._epoch and event is not Event.FOLLOW):
            raise self._illegal(event, about)
        new = about + (event in (Event.RESTART, Event.MEMBERS))
        step = Transition(self.state, event, after, new, cause=cause)
        self._cause = self._cause_after(event, after, cause)
        self.state, self._epoch = after, new
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

    def _cause_after(self, event: Event, after: State, cause: PhalanxError | None) -> PhalanxError | None:
        if after is State.READY:
            return None
        # Broken by a failed restart: keep that failure, not the earlier failure. Otherwise the first failure stays.
        is_first = self._cause is None or self.state is State.RESTARTING
        return cause if event is Event.BREAK and after is State.BROKEN and is_first else self._cause

    def _note(self, step: Transition) -> Transition:
        self._story.append(step)
        return step

    def _illegal(self, event: Event, epoch: int) -> InternalError:
        return InternalError(
            f"group {self._group!r}, {self.state.value} in epoch {self._epoch}, was told {event.value} of epoch "
            f"{epoch}, which cannot happen there; what happened before:",
            story=tuple(str(step) for step in self._story),
        )

    def stale_error(self, epoch: int, method: str) -> StaleEpoch:
        """Return the error of a call whose ranks were replaced or died."""
        return StaleEpoch(
            f"group {self._group!r} was restarted, or has other ranks by now: this call of {method} belongs to epoch "
            f"{epoch}, the group is in epoch {self._epoch}; make the call again",
            group=self._group,
            epoch=epoch,
            current=self._epoch,
        )

    def changing_error(self, method: str) -> StaleEpoch:
        """Return the error of a call of a view whose ranks the owner has ended, and has not followed by others yet."""
        return StaleEpoch(
            f"group {self._group!r}: its owner, in another process, has ended ranks of this call of {method}, to "
            "give the group other ones; make the call again once it has",
            group=self._group,
            epoch=self._epoch,
            current=self._epoch,
        )

    def broken_error(self) -> GroupBroken:
        """Return the error of a call on a broken group, with the cause and a remedy."""
        return GroupBroken(
            f"group {self._group!r} is broken by an earlier failure and takes no calls. restart() makes its "
            f"ranks anew, px.replace_ranks(group) those that are lost, close() frees them. "
            f"{self.remark + ' ' if self.remark else ''}"
            f"The failure was: {_first_line(self._cause)}",
            group=self._group,
            cause=self._cause,
        )

    def _being_restarted(self) -> GroupBroken:
        why = f", after: {_first_line(self._cause)}" if self._cause is not None else ""
        return GroupBroken(
            f"group {self._group!r} is being restarted or given new ranks{why}. It takes no calls until that is over.",
            group=self._group,
            cause=self._cause,
        )


def _first_line(cause: PhalanxError | None) -> str:
    return str(cause).partition("\n")[0] or type(cause).__name__
