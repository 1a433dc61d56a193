"""Exceptions raised by Phalanx, by whose fault they are.

    PhalanxError
     |- DeclarationError         yours: a class, a `@register` or a mesh is declared wrongly
     |- DispatchError            yours: the arguments of a call do not fit; nothing was sent
     |   '- ArgumentLost         an argument was lost with the process that held it
     |- PlacementError           the cluster cannot hold the requested slots
     |- GroupError               a group of workers; has `.group`
     |   |- CallError            a call on it failed; has `.method` and a report per rank
     |   |   |- RemoteCallError  code on a rank raised (also an instance of the exception that it raised)
     |   |   |   '- WorkerInitError   ... in the constructor of the worker class
     |   |   |- WorkerDiedError  the process of a rank died
     |   |   |- CallTimeout      a deadline passed (also a TimeoutError)
     |   |   |- RanksDiverged    the ranks did not do the same, though they should (debug mode)
     |   |   '- CallCancelled    the call was cancelled
     |   |- GroupClosed          yours: the group was closed before this call
     |   |- GroupBroken          an earlier failure, its `.cause`, made the group unusable
     |   '- StaleEpoch           the group was restarted since
     |- WeightsError             weights were not moved from one role to another
     |   |- WeightsMismatch      yours: names, shapes or boxes of the two sides do not fit; nothing was moved
     |   |- WeightsTorn          a sync failed halfway: these weights mix versions
     |   '- WeightsTransferError a peer died or was late while bytes moved
     |       '- WeightsVerificationError    the received weights differ from the sent ones
     |- ChannelError             a channel; has `.channel`
     |   |- ChannelFull          no capacity in time (also a TimeoutError)
     |   |- ChannelEmpty         fewer items in time than requested (also a TimeoutError)
     |   |- ChannelClosed        it was finished or closed, or its owner died
     |   '- ItemsLost            items were lost with the process that had put them
     |- StalenessTimeout         no lease for rows in time (also a TimeoutError)
     |- CheckpointError          a save or a load failed; steps saved earlier stay complete
     |   |- CheckpointLocked     another driver writes there; has `.holder`
     |   |- CheckpointCorrupted  a file of it is missing, or differs from the written one; has `.files`
     |   '- CheckpointMismatch   the saved state does not fit the state that is to load it
     '- InternalError            ours: a bug in phalanx, please report it

All of them pickle with their fields. A rank's part in a failed call is a `RankReport`. `.lost` is true if a lost
process caused the error: a retry can then succeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "ArgumentLost",
    "CallCancelled",
    "CallError",
    "CallTimeout",
    "ChannelClosed",
    "ChannelEmpty",
    "ChannelError",
    "ChannelFull",
    "CheckpointCorrupted",
    "CheckpointError",
    "CheckpointLocked",
    "CheckpointMismatch",
    "DeclarationError",
    "DispatchError",
    "FailureKind",
    "GroupBroken",
    "GroupClosed",
    "GroupError",
    "InternalError",
    "ItemsLost",
    "PhalanxError",
    "PlacementError",
    "RankReport",
    "RankState",
    "RanksDiverged",
    "RemoteCallError",
    "StaleEpoch",
    "StalenessTimeout",
    "WeightsError",
    "WeightsMismatch",
    "WeightsTorn",
    "WeightsTransferError",
    "WeightsVerificationError",
    "WorkerDiedError",
    "WorkerInitError",
]

FailureKind = Literal["raised", "died", "timeout", "cancelled", "stopped", "stale"]
"""The end of a rank's part of a call; "stopped" means that phalanx stopped it because of a peer, "stale" that the
rank belongs to another epoch than the call and refused it."""

RankState = Literal["finished", "running", "queued", "unreachable"]
"""Where a rank was when a deadline passed."""


@dataclass(frozen=True)
class RankReport:
    """The part of a rank in a call that failed: plain data, and the exception itself if there is one."""

    rank: int
    kind: FailureKind
    role: str | None = None
    method: str | None = None
    host: str | None = None
    pid: int | None = None
    accelerator: str | None = None
    """As a reader knows it: "GPU 5", "GPU 0.1 of 3", "TPU 2"."""
    node_id: str | None = None
    victim: bool = False
    """It failed because a peer did: its own code is not to blame."""
    cut_off: bool = False
    """Its exception says that a connection to a peer was lost."""
    type_name: str | None = None
    """Name of the exception's type, with its module unless that is builtins."""
    message: str = ""
    traceback: str = ""
    """Of the remote process, as text, from the first frame of the user's code on."""
    notes: tuple[str, ...] = ()
    exit: str | None = None
    """Why the process is gone: "signal SIGKILL", "exit code 7", "node lost"."""
    hint: str | None = None
    """The probable reason and a remedy, such as an out-of-memory hint."""
    log_tail: tuple[str, ...] = ()
    """The last lines that this rank printed or logged, oldest first."""
    log_path: str | None = None
    state: RankState | None = None
    since: float | None = None
    """Seconds that the rank had been in `state`."""
    stack: str = ""
    """Python stacks of the process while it was busy, as text."""
    at: float | None = None
    """Monotonic time, in seconds of the driver's clock, at which the failure was known."""
    exception_bytes: bytes | None = field(default=None, repr=False, compare=False)
    """The exception, packed by `phalanx.wire.exceptions`; harmless to carry where its class is unknown."""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception rebuilt in this process; it stays behind when the report is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "exception"}

    @property
    def failed(self) -> bool:
        """False for a rank that had finished when another rank missed the deadline."""
        return self.state != "finished"

    @property
    def lost(self) -> bool:
        """True if a process was lost: its own, or a process that held or sent data that it needed."""
        cause = self.exception  # of a call to another group
        if self.kind == "raised" and isinstance(cause, PhalanxError) and cause.lost:
            return True
        return self.kind in ("died", "stale") or self.cut_off or self.type_name in _LOSSES

    def where(self) -> str:
        """Return the rank as text: `rank 2 (host h, pid 123, GPU 5)`."""
        facts = [
            f"host {self.host}" if self.host else "",
            f"pid {self.pid}" if self.pid is not None else "",
            self.accelerator or "",
        ]
        known = ", ".join(fact for fact in facts if fact)
        name = f"rank {self.rank}" if self.rank >= 0 else "a process without a rank"
        return f"{name} ({known})" if known else name


class PhalanxError(Exception):
    """Root of all errors of phalanx.

    Layout and `__init__` are kept plain so that a class can derive from it and from any other exception
    (see `phalanx.collect.failures`): never add slots, never call `super().__init__`.
    """

    def __init__(self, message: str = "") -> None:
        Exception.__init__(self, message)
        self.__dict__["_phalanx_text"] = str(message)

    def __str__(self) -> str:
        return self.__dict__.get("_phalanx_text", "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @property
    def lost(self) -> bool:
        """True if a lost process caused the error. A retry can succeed after its ranks are replaced.

        False for errors of user code, of wrong arguments and of deadlines: they would be raised again each time.
        """
        return False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        cause = self.__cause__ if isinstance(self.__cause__, PhalanxError) else None
        return _restore, (type(self), self.args, dict(self.__dict__), cause)


def _restore(
    cls: type[PhalanxError], args: tuple[Any, ...], state: dict[str, Any], cause: PhalanxError | None
) -> PhalanxError:
    """Unpickle without calling `__init__`, so that subclasses may give it any signature."""
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = cause
    return error


class DeclarationError(PhalanxError):
    """A worker class, a `@register`, a mesh or an option is declared wrongly. Fix the declaration."""


class DispatchError(PhalanxError):
    """The arguments of a call do not fit its dispatch mode or its signature. Nothing was sent."""


class ArgumentLost(DispatchError):
    """An argument of a call, such as another call's result, was lost with the process that held it."""

    @property
    def lost(self) -> bool:
        """True."""
        return True


class PlacementError(PhalanxError):
    """The cluster does not have the requested slots, or did not provide them in time."""


class InternalError(PhalanxError):
    """A bug in phalanx."""

    _ADVICE = "This is a bug in phalanx: please report it with this text."

    def __init__(self, message: str = "") -> None:
        PhalanxError.__init__(self, f"{message}\n{self._ADVICE}" if message else self._ADVICE)


class GroupError(PhalanxError):
    """Base of errors of a group of workers, whose name is `.group`."""

    def __init__(self, message: str = "", *, group: str = "") -> None:
        PhalanxError.__init__(self, message)
        self.__dict__["_phalanx_group"] = group

    @property
    def group(self) -> str:
        """Name of the group."""
        return self.__dict__.get("_phalanx_group", "")


class GroupClosed(GroupError):
    """The group was closed, or is closing, when the call was made."""


class GroupBroken(GroupError):
    """An earlier failure made the group unusable until `restart()`; `.cause` is that failure."""

    def __init__(self, message: str = "", *, group: str = "", cause: PhalanxError | None = None) -> None:
        GroupError.__init__(self, message, group=group)
        self.__cause__ = cause

    @property
    def cause(self) -> PhalanxError | None:
        """The first failure, as it was raised to the caller."""
        given: Any = self.__dict__.get("_phalanx_cause", self.__cause__)
        return given if isinstance(given, PhalanxError) else None

    @property
    def lost(self) -> bool:
        """True if a lost process caused the first failure."""
        return self.cause is not None and self.cause.lost

    @cause.setter
    def cause(self, value: PhalanxError | None) -> None:
        # Raised in a Ray task, it comes as an error of this class and of Ray's, whose ``cause`` Ray sets.
        self.__dict__["_phalanx_cause"] = value


class StaleEpoch(GroupError):
    """A future, a handle or a message belongs to epoch `.epoch`; the group has moved on to `.current`."""

    def __init__(self, message: str = "", *, group: str = "", epoch: int = 0, current: int = 0) -> None:
        GroupError.__init__(self, message, group=group)
        self.epoch = epoch
        self.current = current

    @property
    def lost(self) -> bool:
        """True: its processes died."""
        return True


class CallError(GroupError):
    """A call on a group failed.

    The fields are properties: a remote exception's attributes of the same names never hide them (the exception itself
    is `.failures[i].exception`).
    """

    def __init__(
        self, message: str = "", *, group: str = "", method: str = "", failures: tuple[RankReport, ...] = ()
    ) -> None:
        GroupError.__init__(self, message, group=group)
        self.__dict__["_phalanx_method"] = method
        self.__dict__["_phalanx_failures"] = tuple(failures)

    @property
    def method(self) -> str:
        """Name of the method that was called."""
        return self.__dict__.get("_phalanx_method", "")

    @property
    def failures(self) -> tuple[RankReport, ...]:
        """Reports of the ranks, causes first; with a `CallTimeout` also of ranks that had finished."""
        return self.__dict__.get("_phalanx_failures", ())

    @property
    def causes(self) -> tuple[RankReport, ...]:
        """The reports of the ranks that failed by themselves, the first failure first."""
        return tuple(report for report in self.failures if report.failed and not report.victim)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that failed, ascending."""
        return tuple(sorted({report.rank for report in self.failures if report.failed}))

    @property
    def cause_ranks(self) -> tuple[int, ...]:
        """The ranks that failed by themselves, ascending."""
        return tuple(sorted({report.rank for report in self.causes}))

    @property
    def lost(self) -> bool:
        """True if a rank failed by itself because a process was lost, its own or another that it needed."""
        return any(report.lost for report in self.causes)

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks that failed only because a peer did, ascending."""
        return tuple(sorted({report.rank for report in self.failures if report.failed and report.victim}))


class RemoteCallError(CallError):
    """Code on a rank raised.

    If the remote exception can be rebuilt, the raised error is also an instance of the first cause's type with its
    arguments and attributes, so that `except ValueError` catches a worker's `ValueError`. Its text is that of this
    class: ranks, remote traceback, last lines logged.
    """


class WorkerInitError(RemoteCallError):
    """The constructor of the worker class raised, so that the group was not created."""


class WorkerDiedError(CallError):
    """The process of a rank ended during a call or between calls: see `.failures[i].exit`."""


class CallTimeout(CallError, TimeoutError):
    """A call took longer than its timeout. Each report has `state`, `since` and, if running, `stack`."""

    def __init__(
        self,
        message: str = "",
        *,
        group: str = "",
        method: str = "",
        failures: tuple[RankReport, ...] = (),
        timeout: float | None = None,
    ) -> None:
        CallError.__init__(self, message, group=group, method=method, failures=failures)
        self.__dict__["_phalanx_timeout"] = timeout

    @property
    def timeout(self) -> float | None:
        """The timeout in seconds that ran out."""
        return self.__dict__.get("_phalanx_timeout")


class RanksDiverged(CallError):
    """The ranks of an SPMD group diverged: calls in another order, or differing outputs that are declared replicated.

    Found in debug mode only (`PHALANX_DEBUG=1`); the reports are those of the deviating ranks.
    """


class CallCancelled(CallError):
    """The call was cancelled before it had a result."""


class WeightsError(PhalanxError):
    """Weights were not transferred completely from a role to another."""


class WeightsMismatch(WeightsError):
    """The source publishes other weights than the target accepts. Found before any byte moved.

    `.rows` has a tuple (name, wanted, found, rank) for each fault; the message shows them as a table.
    """

    rows: tuple[tuple[str, str, str, str], ...] = ()


class WeightsTorn(WeightsError):
    """A sync of these weights failed in the middle, or they were lost with a restart: sync before they are used."""


class WeightsTransferError(WeightsError):
    """A peer died or was late, or the received data differ from the sent data. `.peer` names the peer, if known."""

    peer: str | None = None

    @property
    def lost(self) -> bool:
        """True: a peer died, or stalls."""
        return True


class WeightsVerificationError(WeightsTransferError):
    """Other bytes arrived than were sent; the message names the tensors and their parts."""

    @property
    def lost(self) -> bool:
        """Always False: no process was lost."""
        return False


class ChannelError(PhalanxError):
    """Base of errors of a channel, whose name is `.channel`."""

    def __init__(self, message: str = "", *, channel: str = "") -> None:
        PhalanxError.__init__(self, message)
        self.channel = channel


class ChannelFull(ChannelError, TimeoutError):
    """There was no room for an item in time, or none could ever come. The item is not in, nothing of it is kept."""


class ChannelEmpty(ChannelError, TimeoutError):
    """There was not as much in time as was asked for, or none could ever come. Nothing was taken."""


class ChannelClosed(ChannelError):
    """The channel was finished and is empty, was closed, or its owner died; or this producer was closed.

    `.owner_died` is True if the process that hosts the channel died, or does not answer.
    """

    owner_died: bool = False


class ItemsLost(ChannelError):
    """Items were lost with the processes that held their bytes. Raised once, at the first take after the loss.

    `.losses` has an entry for each process: `holder`, `why`, and the numbers of `items`, `rows` and waiting `puts`.
    """

    losses: tuple[Any, ...] = ()

    @property
    def lost(self) -> bool:
        """True."""
        return True


class StalenessTimeout(PhalanxError, TimeoutError):
    """Rows were not let begin within the time given: training is too far behind for them."""


class CheckpointError(PhalanxError):
    """A save or a load failed: no space, no permission, no such step. Steps saved earlier stay complete."""


class CheckpointLocked(CheckpointError):
    """Another driver writes to that path. `.holder` is who: host, pid, and since when."""

    def __init__(self, message: str = "", *, holder: str = "") -> None:
        PhalanxError.__init__(self, message)
        self.holder = holder


class CheckpointCorrupted(CheckpointError):
    """Files of a saved step are missing, or differ from the written files. `.files` names them."""

    def __init__(self, message: str = "", *, files: tuple[str, ...] = ()) -> None:
        PhalanxError.__init__(self, message)
        self.files = files


class CheckpointMismatch(CheckpointError):
    """The saved state does not fit the groups that load it: other groups, names, shapes, or another number of ranks."""


# Errors raised by a rank that report the loss of another process, by the type name in its report.
_LOSSES = frozenset(
    f"{one.__module__}.{one.__qualname__}"
    for one in (ArgumentLost, ItemsLost, StaleEpoch, WeightsTransferError)
)
