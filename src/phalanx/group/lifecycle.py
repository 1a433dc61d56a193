"""The lifecycle of a group as a table of transitions. No IO, no clock, no threads.

    starting ---started--> ready ---restart--> restarting ---started--> ready
        '------break-----> broken <---break---' |
                             '------restart-----'
    ready ---members--> ready, as the next epoch
    ready, broken ---follow--> ready, in a view, once the owner has given the group other ranks
    close leads from every state to closing, and closed from there to closed.

Everything that changes the state of a group is an event passed to ``Lifecycle.handle``, and every effect of an event is
an entry of ``TRANSITIONS``. ``Group`` passes the events of calls, restarts and closes, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from phalanx.errors import DispatchError, GroupBroken, GroupClosed, InternalError, PhalanxError, StaleEpoch
from phalanx.wire.failure import stale_call


class State(Enum):
    """State of a group in its lifecycle."""

    STARTING = "starting"
    READY = "ready"
    BROKEN = "broken"
    RESTARTING = "restarting"
    CLOSING = "closing"
    CLOSED = "closed"


class Event(Enum):
    """Event that may change the state of a group."""

    STARTED = "started"
    """All ranks of an epoch have been constructed, and, after a restart, their calls were repeated."""
    BREAK = "break"
    """The ranks of an epoch cannot work together any more: a rank was lost, or was stopped."""
    RESTART = "restart"
    """Ranks get new processes, all or some; a new epoch begins."""
    MEMBERS = "members"
    """Ranks join or leave while the others continue to work; a new epoch begins."""
    FOLLOW = "follow"
    """A view learned of an epoch that the group's owner, in another process, has begun."""
    CLOSE = "close"
    """The group is to be closed."""
    CLOSED = "closed"
    """The processes of the group have ended, and its slots are free."""


#: Each event with the states in which it may happen, and the state after it.
_EFFECTS = (
    (Event.STARTED, (State.STARTING, State.RESTARTING), State.READY),
    # More ranks may fail after the first one.
    (Event.BREAK, (State.STARTING, State.READY, State.RESTARTING, State.BROKEN), State.BROKEN),
    (Event.RESTART, (State.READY, State.BROKEN), State.RESTARTING),
    (Event.MEMBERS, (State.READY,), State.READY),
    (Event.FOLLOW, (State.READY, State.BROKEN), State.READY),
    (Event.CLOSE, (State.STARTING, State.READY, State.BROKEN, State.RESTARTING), State.CLOSING),
    (Event.CLOSED, (State.CLOSING,), State.CLOSED),
    # A start or a failure during the close, and further calls of close().
    *(
        (event, (state,), state)
        for state in (State.CLOSING, State.CLOSED)
        for event in (Event.STARTED, Event.BREAK, Event.CLOSE)
    ),
)
#: The state after each event; a missing pair is a bug of the sender of the event.
TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (before, event): after for event, states, after in _EFFECTS for before in states
}


class Lifecycle:
    """State, epoch and cause of failure of a group. Changed only by ``handle``.

    ``cause`` is the first failure of the epoch that broke. It is set while the group is broken, kept while it restarts
    or closes, and removed once it is ready again.
    """

    def __init__(self, group: str, *, epoch: int = 0, owner: bool = True) -> None:
        self._group = group
        #: Advice for callers of a broken group.
        self.remedies = (
            "restart() recreates its ranks, px.replace_ranks(group) replaces the lost ranks, close() ends the group."
            if owner
            else "Its owner can restart it. If it is attached, px.attach finds the new ranks then, or close(pool=True) "
            "ends it, so that it can be recreated."
        )
        self.state = State.STARTING
        #: Number of the present roster: it grows by 1 with each restart, and each change of the members.
        self.epoch = epoch
        self.cause: PhalanxError | None = None
        #: Further information for callers of a broken group, such as why it was not restarted.
        self.remark = ""
        #: Reason and remedy, if the group was not closed by a call of close().
        self.closed_because = ""

    def handle(self, event: Event, epoch: int | None = None, cause: PhalanxError | None = None) -> None:
        """Handle an event. Events of an older epoch have no effect.

        Args:
            event: the event.
            epoch: the epoch of the event, or the epoch to follow; None: the present epoch.
            cause: the failure, for ``Event.BREAK``.

        Raises:
            InternalError: if the event cannot happen in this state; nothing has changed.
        """
        about = self.epoch if epoch is None else epoch
        if about < self.epoch:
            return
        after = TRANSITIONS.get((self.state, event))
        if after is None or (about > self.epoch and event is not Event.FOLLOW):
            raise InternalError(
                f"group {self._group!r}, {self.state.value} in epoch {self.epoch}, got the event {event.value} of "
                f"epoch {about}, which cannot happen there."
            )
        # Broken by a failed restart: keep that failure, not the earlier failure. Otherwise the first failure stays.
        is_first = self.cause is None or self.state is State.RESTARTING
        if after is State.READY or (event is Event.BREAK and after is State.BROKEN and is_first):
            self.cause = None if after is State.READY else cause
            self.remark = ""
        self.state, self.epoch = after, about + (event in (Event.RESTART, Event.MEMBERS))

    def check_callable(self) -> None:
        """Check that the group takes calls now.

        Raises:
            GroupClosed: if the group is closed or closing.
            GroupBroken: if the group is broken (with the first cause) or being restarted.
            DispatchError: if the group is still starting.
        """
        if self.state is State.READY:
            return
        if self.state in (State.CLOSING, State.CLOSED):
            raise GroupClosed(
                f"group {self._group!r} is {self.state.value}: a call was made on it, but a closed group "
                f"takes none. {self.closed_because or 'Create the group again, or call it before close().'}",
                group=self._group,
            )
        if self.state is State.BROKEN:
            raise self.broken_error()
        if self.state is State.RESTARTING:
            why = f", after: {first_line(self.cause)}" if self.cause is not None else ""
            raise GroupBroken(
                f"group {self._group!r} is being restarted or given new ranks{why}. It takes no calls until that is "
                'over: repeat the call once its state is "ready".',
                group=self._group,
                cause=self.cause,
            )
        raise DispatchError(
            f"group {self._group!r} is still starting: a call was made before its ranks were ready. Wait "
            "until WorkerGroup(...) has returned."
        )

    def stale_error(self, epoch: int, method: str) -> StaleEpoch:
        """Return the error of a call whose ranks were replaced or died."""
        return stale_call(self._group, method, epoch, self.epoch)

    def changing_error(self, method: str) -> StaleEpoch:
        """Return the error of a view's call whose ranks the owner has ended, and not replaced yet."""
        return StaleEpoch(
            f"group {self._group!r}: its owner, in another process, has ended ranks of this call of {method}, to "
            "give the group other ones; make the call again once it has",
            group=self._group,
            epoch=self.epoch,
            current=self.epoch,
        )

    def broken_error(self) -> GroupBroken:
        """Return the error of a call on a broken group, with the cause and a remedy."""
        return GroupBroken(
            f"group {self._group!r} is broken by an earlier failure and takes no calls. {self.remedies} "
            f"{self.remark + ' ' if self.remark else ''}"
            f"The failure was: {first_line(self.cause)}",
            group=self._group,
            cause=self.cause,
        )


def first_line(cause: BaseException | None) -> str:
    """Return the first line of the text of an error, for a message; the name of its type if it has no text."""
    return str(cause).partition("\n")[0] or type(cause).__name__
