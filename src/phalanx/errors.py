"""Exceptions of Phalanx: "yours" are errors of the user's code, "ours" are bugs of Phalanx.

    PhalanxError
     |- DeclarationError         yours: the declaration of a class, a method, a mesh or an option is invalid
     |- DispatchError            yours: the arguments of a call do not fit; nothing was sent
     |   '- ArgumentLost         an argument was lost with the process that held it
     |- PlacementError           the cluster cannot hold the requested slots
     |- GroupError               a group of workers; has `.group`
     |   |- CallError            a call on it failed; has `.method` and a report per rank
     |   |   |- RemoteCallError  code on a rank raised (also an instance of the exception that it raised)
     |   |   |   '- WorkerInitError   ... in the constructor of the worker class
     |   |   |- WorkerDiedError  the process of a rank died
     |   |   |- CallTimeout      a deadline passed (also a TimeoutError)
     |   |   |- RanksDiverged    ranks differed in calls or replicated outputs (debug mode)
     |   |   '- CallCancelled    the call was cancelled
     |   |- GroupClosed          yours: the group was closed before this call
     |   |- GroupBroken          an earlier failure, its `.cause`, made the group unusable
     |   '- StaleEpoch           the ranks of the group changed since
     |- WeightsError             a weight sync failed
     |   |- WeightsMismatch      yours: names, shapes or boxes of the two sides do not fit; nothing was sent
     |   |- WeightsTorn          a sync failed halfway: these weights mix versions
     |   '- WeightsTransferError a peer died or was late during the transfer
     |       '- WeightsVerificationError    the received weights differ from the sent weights
     |- ChannelError             a channel; has `.channel`
     |   |- ChannelFull          no capacity in time (also a TimeoutError)
     |   |- ChannelEmpty         fewer items in time than requested (also a TimeoutError)
     |   |- ChannelClosed        the channel was finished or closed, or its owner died
     |   '- ItemsLost            items were lost with the process that held their bytes
     |- StalenessTimeout         no lease for rows in time (also a TimeoutError)
     |- CheckpointError          a save or a load failed; steps saved earlier stay complete
     |   |- CheckpointLocked     another driver writes to the path; has `.holder`
     |   |- CheckpointCorrupted  a file of the step is missing or was changed; has `.files`
     |   '- CheckpointMismatch   the saved state does not fit the state that is to load it
     '- InternalError            ours: a bug in phalanx, please report it

All errors pickle with their fields. A rank's part in a failed call is a `RankReport`. `.lost` is true if a lost process
caused the error, so that a retry can succeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

FailureKind = Literal["raised", "died", "timeout", "cancelled", "stopped", "stale"]
"""How a rank's part of a call ended. "stopped": phalanx stopped the rank because a peer failed; "stale": the rank
refused the call, which belongs to another epoch."""

RankState = Literal["finished", "running", "queued", "unreachable"]
"""State of a rank when the deadline of its call passed."""


@dataclass(frozen=True)
class RankReport:
    """The part of a rank in a failed call: plain data, and the exception if the rank raised."""

    rank: int
    kind: FailureKind
    role: str | None = None
    method: str | None = None
    host: str | None = None
    pid: int | None = None
    accelerator: str | None = None
    """Accelerator for display: "GPU 5", "GPU 0.1 of 3", "TPU 2"."""
    node_id: str | None = None
    victim: bool = False
    """True if the rank failed because a peer failed."""
    cut_off: bool = False
    """True if the rank's exception means that a connection to a peer was lost."""
    type_name: str | None = None
    """Name of the exception's type, with its module unless this is builtins or __main__."""
    message: str = ""
    traceback: str = ""
    """Traceback on the rank as text, from the first frame of the user's code on."""
    notes: tuple[str, ...] = ()
    exit: str | None = None
    """How the process ended: "signal SIGKILL", "exit code 7", "node lost"."""
    hint: str | None = None
    """Probable reason and a remedy, such as an out-of-memory hint."""
    log_tail: tuple[str, ...] = ()
    """Last lines that the rank printed or logged, oldest first."""
    log_path: str | None = None
    state: RankState | None = None
    since: float | None = None
    """Seconds that the rank had been in `state`."""
    stack: str = ""
    """Python stack of the process, as text, if it was busy or crashed."""
    at: float | None = None
    """Time at which the failure became known, in seconds of the driver's monotonic clock."""
    exception_bytes: bytes | None = field(default=None, repr=False, compare=False)
    """The exception as packed by `phalanx.wire.exceptions`; processes without its class can carry the bytes."""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    """The exception rebuilt in this process; it is not pickled with the report."""

    def __getstate__(self) -> dict[str, Any]:
        is_loss = self.cut_off or (self.kind == "raised" and self.lost)  # also known without the exception
        return {**self.__dict__, "exception": None, "cut_off": is_loss}

    @property
    def failed(self) -> bool:
        """False for a rank that had finished when another rank missed the deadline."""
        return self.state != "finished"

    @property
    def lost(self) -> bool:
        """True if a process was lost: the rank's own, or a process that held or sent data for the rank."""
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
    """Base class of all errors of phalanx.

    Layout and `__init__` are plain, so that a class can derive from it and any other exception type
    (see `phalanx.collect.failures`): never add slots, never call `super().__init__`.
    """

    def __init__(self, message: str = "") -> None:
        Exception.__init__(self, message)
        self.__dict__["_phalanx_text"] = str(message)

    def __str__(self) -> str:
        return self.__dict__.get("_phalanx_text", "")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    #: True for errors that are always caused by a lost process.
    _means_loss: ClassVar[bool] = False

    @property
    def lost(self) -> bool:
        """True if a lost process caused the error. A retry can succeed after the lost ranks are replaced.

        False for errors of user code, wrong arguments and deadlines, which a retry would raise again.
        """
        return type(self)._means_loss

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        cause = self.__cause__ if isinstance(self.__cause__, PhalanxError) else None
        return _restore, (type(self), self.args, dict(self.__dict__), cause)


def _restore(
    cls: type[PhalanxError], args: tuple[Any, ...], state: dict[str, Any], cause: PhalanxError | None
) -> PhalanxError:
    """Recreate an error without calling `__init__`, which may have any signature in subclasses."""
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    if cause is not None:
        error.__cause__ = cause
    return error


class DeclarationError(PhalanxError):
    """The declaration of a worker class, a method, a mesh or an option is invalid."""


class DispatchError(PhalanxError):
    """The arguments of a call do not fit the signature or dispatch mode of the method. Nothing was sent."""


class ArgumentLost(DispatchError):
    """An argument of a call, such as another call's result, was lost with the process that held it."""

    _means_loss = True


class PlacementError(PhalanxError):
    """The cluster does not have the requested slots, or did not provide them in time."""


class InternalError(PhalanxError):
    """A bug in phalanx."""

    _ADVICE = "This is a bug in phalanx: please report it with this text."

    def __init__(self, message: str = "") -> None:
        PhalanxError.__init__(self, f"{message}\n{self._ADVICE}" if message else self._ADVICE)


class GroupError(PhalanxError):
    """Base class of errors of a group of workers, whose name is `.group`."""

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
        # A Ray task raises this error as an instance of this class and of Ray's, whose ``cause`` Ray sets.
        self.__dict__["_phalanx_cause"] = value


class StaleEpoch(GroupError):
    """A future, a handle or a message belongs to the group epoch `.epoch`, and the current epoch is `.current`."""

    def __init__(self, message: str = "", *, group: str = "", epoch: int = 0, current: int = 0) -> None:
        GroupError.__init__(self, message, group=group)
        self.epoch = epoch
        self.current = current

    _means_loss = True  # processes of the former epoch have ended


class CallError(GroupError):
    """A call on a group failed.

    The fields are properties, so attributes of a remote exception with the same names never hide them. The exception
    itself is `.failures[i].exception`.
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
        """Reports of failed ranks, causes first; for a `CallTimeout`, also reports of ranks that had finished."""
        return self.__dict__.get("_phalanx_failures", ())

    @property
    def causes(self) -> tuple[RankReport, ...]:
        """Reports of the ranks that failed on their own, first failure first."""
        return tuple(report for report in self.failures if report.failed and not report.victim)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All failed ranks, ascending."""
        return tuple(sorted({report.rank for report in self.failures if report.failed}))

    @property
    def cause_ranks(self) -> tuple[int, ...]:
        """Ranks that failed on their own, ascending."""
        return tuple(sorted({report.rank for report in self.causes}))

    @property
    def lost(self) -> bool:
        """True if a cause of the failure is a lost process."""
        return any(report.lost for report in self.causes)

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks that failed only because a peer failed, ascending."""
        return tuple(sorted({report.rank for report in self.failures if report.failed and report.victim}))


class RemoteCallError(CallError):
    """Code on a rank raised.

    If the exception of the first cause can be rebuilt, the raised error is also an instance of its type, with its
    arguments and attributes, so that `except ValueError` catches a worker's `ValueError`. The text has the ranks, the
    remote traceback and the last lines logged.
    """


class WorkerInitError(RemoteCallError):
    """The constructor of a worker class raised while a group was started, restarted or got new ranks."""


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
        """The timeout in seconds that expired."""
        return self.__dict__.get("_phalanx_timeout")


class RanksDiverged(CallError):
    """Ranks ran calls in another order than others, or their outputs differ though they are declared replicated.

    Only raised in debug mode (`PHALANX_DEBUG=1`). The reports are of the deviating ranks.
    """


class CallCancelled(CallError):
    """The call was cancelled before it had a result."""


class WeightsError(PhalanxError):
    """Base class of errors of weights and weight syncs."""


class WeightsMismatch(WeightsError):
    """The source publishes other weights than the target accepts. Raised before any byte is sent.

    `.rows` has a tuple (name, wanted, found, rank) for each mismatch; the message shows them as a table.
    """

    rows: tuple[tuple[str, str, str, str], ...] = ()


class WeightsTorn(WeightsError):
    """A sync of the weights failed halfway, or a restart lost them. Sync again before they are used."""


class WeightsTransferError(WeightsError):
    """A peer died or was late, or the received data differ from the sent data. `.peer` names the peer, if known."""

    peer: str | None = None
    _means_loss = True  # a peer died or stalls


class WeightsVerificationError(WeightsTransferError):
    """The received data differ from the sent data. The message names the tensors and their parts."""

    _means_loss = False


class ChannelError(PhalanxError):
    """Base class of errors of a channel, whose name is `.channel`."""

    def __init__(self, message: str = "", *, channel: str = "") -> None:
        PhalanxError.__init__(self, message)
        self.channel = channel


class ChannelFull(ChannelError, TimeoutError):
    """The channel had no capacity for an item in time, or never can have it. No part of the item was put."""


class ChannelEmpty(ChannelError, TimeoutError):
    """The channel had fewer items or rows in time than requested, or never can have them. Nothing was taken."""


class ChannelClosed(ChannelError):
    """The channel was finished and is empty, was closed, or its owner died; or the producer was closed.

    `.owner_died` is True if the process that owns the channel died or does not respond.
    """

    owner_died: bool = False


class ItemsLost(ChannelError):
    """Items were lost with the processes that held their bytes. Raised once, by the first take after the loss.

    `.losses` has an entry for each process: `holder`, `why`, and the numbers of `items`, `rows` and waiting `puts`.
    """

    losses: tuple[Any, ...] = ()
    _means_loss = True


class StalenessTimeout(PhalanxError, TimeoutError):
    """No lease for rows was available within the timeout: training is too far behind."""


class CheckpointError(PhalanxError):
    """A save or a load failed: no space, no permission, no such step. Steps saved earlier stay complete."""


class CheckpointLocked(CheckpointError):
    """Another driver writes to the path. `.holder` describes it: host, pid, and start time."""

    def __init__(self, message: str = "", *, holder: str = "") -> None:
        PhalanxError.__init__(self, message)
        self.holder = holder


class CheckpointCorrupted(CheckpointError):
    """Files of a saved step are missing, or differ from the written files. `.files` has their names."""

    def __init__(self, message: str = "", *, files: tuple[str, ...] = ()) -> None:
        PhalanxError.__init__(self, message)
        self.files = files


class CheckpointMismatch(CheckpointError):
    """The saved state does not fit the groups that load it: other groups, names, shapes, or another number of ranks."""


# Type names in the report of a rank whose error means the loss of another process.
_LOSSES = frozenset(
    f"{one.__module__}.{one.__qualname__}"
    for one in list(globals().values())
    if isinstance(one, type) and issubclass(one, PhalanxError) and one._means_loss
)
