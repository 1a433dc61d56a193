"""The state of a call, and its pending results.

It has exactly one of four statuses, which cannot contradict each other.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.backends.backend_types import Backend, RankOutcome, Ref, Ticket
from phalanx.calls.counts import process
from phalanx.calls.listeners import Heard, Listeners
from phalanx.calls.timeouts import bounded
from phalanx.dispatch.plan import CallPlan, Target
from phalanx.display.metric_buffer import meters
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.wire.messages import full_name
from phalanx.wire.unpack import Meter
from phalanx.wire.value import Value


@dataclass(frozen=True)
class UnderWay:
    """The end of the call is not known yet."""


@dataclass(frozen=True)
class Cancelling:
    """Somebody is ending it; ``over`` is set when it stands how that went."""

    over: threading.Event


@dataclass(frozen=True)
class Returned:
    """All ranks of the call returned; ``value`` is the joined result."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """The call ended with this error."""

    error: BaseException


Status = UnderWay | Cancelling | Returned | Raised
UNDER_WAY = UnderWay()


def raisable(error: BaseException) -> BaseException:
    """A copy to raise of an error that is kept: the frames that it then passes through are not kept with it."""
    try:
        fresh = copy.copy(error)
    except Exception:  # not every exception of users can be copied
        return error
    fresh.__cause__, fresh.__context__ = error.__cause__, error.__context__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh if type(fresh) is type(error) else error


class WaitOver(Exception):
    """A wait for a call is over, while the call continues."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Results:
    """The references to the outputs of ranks that were called individually."""

    __slots__ = ("_backend", "_tickets", "_values")

    def __init__(self, backend: Backend, tickets: Sequence[Ticket]) -> None:
        self._backend = backend
        self._tickets = tickets
        self._values = [ticket.value for ticket in tickets]

    def __len__(self) -> int:
        return len(self._tickets)

    def fetch(self, timeout: float | None) -> list[Any]:
        """Return the outputs of all ranks.

        Raises:
            FetchFailed: an output cannot be fetched; raised as soon as that is known.
            NotReady: time is up.
        """
        return self._backend.fetch(self._values, timeout)

    def fetched_with_others(self) -> Sequence[Ref] | None:
        """Return the references that can be fetched in a batch with other calls; None if they cannot."""
        return self._values

    def awaited(self) -> Sequence[Ref]:
        """Return the references to wait for: all end once every rank has ended, or a rank has failed."""
        return self._values

    def all_ended(self) -> bool:
        """Return whether all ranks have ended; does not wait."""
        return not self._backend.wait(self._values, len(self._values), 0)[1]

    def output(self, position: int) -> Value:
        """Return the output of an ended rank.

        Raises:
            FetchFailed: it cannot be had.
        """
        return self._backend.fetch([self._values[position]])[0]

    def wait(
        self, positions: Sequence[int], count: int, timeout: float | None
    ) -> tuple[list[int], list[int]]:
        """Return the positions that have ended (at least ``count``, unless time runs out), and the rest."""
        ended, rest = self._backend.wait([self._values[p] for p in positions], count, timeout)
        return [positions[index] for index in ended], [positions[index] for index in rest]

    def outcome(self, position: int) -> RankOutcome:
        """Return how an ended rank's part ended."""
        return self._backend.outcome(self._values[position])

    def reference(self, position: int) -> Ticket:
        """Return the ticket of a rank's output, finished or not, to pass to other calls."""
        return self._tickets[position]

    def call_ids(self) -> list[int]:
        """Return the id by which each rank knows the call."""
        return [self._backend.call_id(value) for value in self._values]

    def disregard(self) -> None:
        """Note that the call is over, and that the outputs of its ranks will not be read; does not wait."""
        self._backend.disregard([ref for ticket in self._tickets for ref in ticket if ref is not None])

    def leave(self) -> None:
        """Note that the call was cancelled, so that the outputs of its ranks are not read; does not wait."""


class CallState:
    """A call from its plan to its end: its ranks, epoch, deadline and pending results.

    Made before anything is sent; ``arrivals`` is set after sending. ``number`` is its place among the calls of this
    process on the group, in traces and in debug mode. ``limit`` is its deadline in seconds, from ``started``, on the
    backend's clock. A custom collect function gets ``collector`` as the group. ``verify`` checks the outputs before
    they are joined (debug mode). ``acts`` is False if the caller handles the end itself (a start, a call of the
    library): the group is then neither broken nor closed by it, and no rank is stopped.
    """

    __slots__ = (
        "__weakref__",
        "_lock",
        "_waiting",
        "acts",
        "arrivals",
        "began",
        "collector",
        "core",
        "deadline",
        "epoch",
        "heard",
        "is_init",
        "limit",
        "listeners",
        "method",
        "number",
        "plan",
        "role",
        "stall_after",
        "stall_at",
        "started",
        "status",
        "told",
        "trace",
        "verify",
        "was_sent",
    )

    arrivals: Results

    def __init__(
        self,
        core: Group,
        epoch: Epoch,
        plan: CallPlan,
        role: str,
        method: str,
        number: int,
        listeners: Listeners,
        *,
        acts: bool = True,
        is_init: bool = False,
        verify: Callable[[CallState, Sequence[Any]], None] | None = None,
        limit: float | None = None,
        stall_after: float | None = None,
        collector: Target | None = None,
        began: int = 0,
    ) -> None:
        self.core = core
        self.epoch = epoch
        self.plan = plan
        self.role = role
        self.method = method
        self.number = number
        self.acts = acts
        self.is_init = is_init
        self.verify = verify
        self.listeners = listeners
        self.heard: Heard = listeners.heard
        self.collector = collector
        self.began = began
        self.started = core.backend.now()
        self.limit = limit = None if limit is None else bounded(limit)
        self.deadline = None if limit is None else self.started + limit
        self.stall_after = stall_after = None if stall_after is None else bounded(stall_after)
        self.stall_at = None if stall_after is None else self.started + stall_after
        self.trace = ""
        self.told = False
        self.was_sent = False
        self.status: Status = UNDER_WAY
        self._lock = threading.Lock()  # of the status
        self._waiting = threading.Lock()  # held by the thread that fetches the value

    @property
    def group(self) -> str:
        """Name of the group."""
        return self.core.name

    @property
    def meter(self) -> Meter | None:
        """Counter of the bytes that arrive; None if the call is not a user's."""
        return self.core.counts.arrived if self.acts else None

    @property
    def over(self) -> bool:
        """True if the call has ended with a value or an error."""
        return type(self.status) in (Returned, Raised)

    def tell(self, hooks: Sequence[Callable[..., None]], *what: Value) -> None:
        """Notify the listeners of a step; a listener that raises is removed, and the call continues."""
        for hook in hooks:
            try:
                hook(self, *what)
            except Exception as error:
                self.listeners.drop(hook, error)

    def tell_asked(self) -> None:
        """Notify the listeners that a caller waits for the call."""
        if self.heard.asked:
            self.tell(self.heard.asked)

    def note_sent(self, nbytes: int) -> None:
        """Note that all messages of the call were sent, of ``nbytes`` in all."""
        self.was_sent = True
        if self.acts:
            for counts in (self.core.counts, process):
                counts.calls += 1
                counts.sent_bytes += nbytes
        self.tell(self.heard.sent, nbytes)

    def tell_end(self, error: BaseException | None) -> None:
        """Tell its listeners, once, that it is over."""
        if self.told:
            return
        self.told = True
        core = self.core
        if core.chosen:
            with core.calls_lock:
                core.chosen.pop(self.number, None)
        if core.reruns.entries:
            core.reruns.ended(self, error)
        if self.acts and error is not None and self.was_sent:
            for counts in (core.counts, process):
                counts.failed += 1
        if self.acts and meters.on and not core.backend.immediate:
            seconds = core.backend.now() - self.started
            meters.ended(core.name, full_name(self.role, self.method), seconds, error is not None)
        if self.heard.ended:
            self.tell(self.heard.ended, error)
