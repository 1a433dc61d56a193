"""Combine the reports of all ranks that failed in a call into a single error. Pure.

If a rank fails, its peers fail too: their collectives lose a connection, or they are stopped. This module distinguishes
*causes* (ranks that failed on their own) from *victims*.

The error is also an instance of the worker's exception type, by a class that is created at run time from both types.
The instance gets the arguments and attributes of the remote exception without running code of its class; text, pickling
and identity are phalanx's. If any of this fails, the error is a plain `RemoteCallError` with the same text.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.collect.message import render
from phalanx.errors import (
    CallCancelled,
    CallError,
    CallTimeout,
    ChannelError,
    CheckpointError,
    InternalError,
    PhalanxError,
    RankReport,
    RemoteCallError,
    StaleEpoch,
    StalenessTimeout,
    WeightsError,
    WeightsTransferError,
    WorkerDiedError,
    WorkerInitError,
)
from phalanx.wire.exceptions import Parts, assemble, load_parts, unpack
from phalanx.wire.failure import RankFailure

# Messages of gloo, NCCL, HCCL and the c10d store on ranks that waited for a lost peer. Sources: gloo
# transport/tcp/{pair,unbound_buffer}.cc, NCCL's ncclGetErrorString and ncclGetLastError, torch
# ProcessGroupNCCL.cpp, TCPStore.cpp.
_CONNECTION_IS_GONE = re.compile(
    r"connection closed by peer|connection reset by peer|connection refused|broken pipe|socket closed"
    r"|remote process exit|remote process has terminated|ncclRemoteError|ncclSystemError"
    r"|failed to recv, got 0 bytes|no route to host",
    re.IGNORECASE,
)
_PEER_IS_GONE = re.compile(
    _CONNECTION_IS_GONE.pattern
    + r"|communicator was aborted|timed out waiting|timeout waiting for|socket timeout"
    r"|watchdog caught collective|application timeout caused pair closure|store.*(?:timed? ?out|closed)",
    re.IGNORECASE,
)
# Exception types of torch.distributed with these messages; other code does not raise a bare RuntimeError with them.
_OF_A_COLLECTIVE = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
_COLLECTIVE_FRAME = re.compile(
    r"torch[/\\]distributed[/\\]|ProcessGroup|third_party[/\\]gloo|c10d", re.IGNORECASE
)
# Type that a rank raises if it lost its peer in a weight sync.
_SYNC_PEER_IS_GONE = f"{WeightsTransferError.__module__}.{WeightsTransferError.__qualname__}"
# A stack frame of a process that waits for its peers, in the format of faulthandler and traceback.
_WAITS_FOR_PEERS = re.compile(
    r'torch[/\\]distributed[/\\].*", line \d+,? in '
    r"(?:\w*all_(?:reduce|gather|to_all)\w*|\w*reduce\w*|gather\w*|\w*scatter\w*|\w*broadcast\w*|\w*barrier"
    r"|i?recv\w*|i?send\w*|batch_isend_irecv|wait|_rendezvous_handler|init_process_group)\b"
)


def combine(
    group: str,
    method: str,
    reports: Sequence[RankReport],
    *,
    timeout: float | None = None,
    init: bool = False,
) -> CallError | StaleEpoch:
    """Return the error that a failed call raises.

    It is a `StaleEpoch` if a rank refused the call because of another epoch, whatever the other reports are; else a
    `WorkerDiedError` if a rank died on its own; else a `RemoteCallError` (a `WorkerInitError` if `init`) if a rank
    raised, also an instance of the first cause's type; else a `CallTimeout` if the deadline of `timeout` seconds was
    missed; else a `CallCancelled`. `reports` are the reports of all known ranks in any order; `at` orders the failures.

    Raises:
        InternalError: if no report is a failure.
    """
    if not any(report.failed for report in reports):
        raise InternalError(f"the call {method} on group {group!r} failed, but no rank reported a failure")
    failures = with_victims(reports)
    causes = [report for report in failures if report.failed and not report.victim]
    kinds = {report.kind for report in causes}
    for report in causes:
        if report.kind == "stale" and isinstance(stale := unpack(report.exception_bytes), StaleEpoch):
            return stale
    message = render(group, method, failures, timeout=timeout, init=init)
    if "died" in kinds:
        return WorkerDiedError(message, group=group, method=method, failures=failures)
    if "raised" in kinds:
        plain = WorkerInitError if init else RemoteCallError
        return remote_error(plain, message, group=group, method=method, failures=failures)
    if "timeout" in kinds:
        return CallTimeout(message, group=group, method=method, failures=failures, timeout=timeout)
    return CallCancelled(message, group=group, method=method, failures=failures)


def with_victims(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """Return the reports with `victim` set: causes first, then victims, then ranks that had finished.

    Each part is ordered by time. There is always a cause: if all ranks look like victims, it is the first rank that
    failed without being stopped.
    """
    failed = sorted((report for report in reports if report.failed), key=_order)
    causes = sorted(_causes(failed), key=_order)
    if not causes and failed:
        causes = [min(failed, key=lambda report: (report.kind == "stopped", *_order(report)))]
    # Compared by identity, since different processes may have equal reports.
    ids = {id(report) for report in causes}
    victims = [dataclasses.replace(report, victim=True) for report in failed if id(report) not in ids]
    finished = sorted((report for report in reports if not report.failed), key=_order)
    own = (dataclasses.replace(report, victim=False, cut_off=is_cut_off(report)) for report in causes)
    return (*own, *victims, *finished)


def looks_like_victim(report: RankReport) -> bool:
    """Return whether the exception of a rank comes from a collective and means that a peer was lost."""
    if report.kind != "raised":
        return False
    if _PEER_IS_GONE.search(report.message) is None:
        return _chained_from_collective(report)
    name = (report.type_name or "").rpartition(".")[2]
    return name in _OF_A_COLLECTIVE or _COLLECTIVE_FRAME.search(report.traceback) is not None


def tells_of_a_peer(report: RankReport) -> bool:
    """Return whether the report of a rank shows that another rank was lost."""
    return report.type_name == _SYNC_PEER_IS_GONE or looks_like_victim(report)


def is_cut_off(report: RankReport) -> bool:
    """Return whether the exception of a rank comes from a collective and means that a connection was lost."""
    said = f"{report.message}\n{report.traceback}"
    return looks_like_victim(report) and _CONNECTION_IS_GONE.search(said) is not None


def _chained_from_collective(report: RankReport) -> bool:
    """Return whether an exception was raised `from` a collective's exception, for example by a training framework."""
    if not any(f"{name}: " in report.traceback for name in _OF_A_COLLECTIVE):
        return False
    return any(
        line.partition(":")[0].rpartition(".")[2] in _OF_A_COLLECTIVE
        and _PEER_IS_GONE.search(line) is not None
        for line in report.traceback.splitlines()
        if not line.startswith(" ")
    )


def _causes(failed: Sequence[RankReport]) -> list[RankReport]:
    """Return the reports of ranks that died, or that raised for another reason than a lost peer.

    If there are none, return the ranks that were cancelled or missed the deadline. Late ranks that waited for peers or
    in the queue are left out if other late ranks were busy.
    """
    blamable = [report for report in failed if not report.victim and report.kind != "stopped"]
    own = [
        each
        for each in blamable
        if each.kind == "died" or (each.kind == "raised" and not looks_like_victim(each))
    ]
    if own:  # a lost peer of a sync is not a cause, if there is another
        return [each for each in own if each.type_name != _SYNC_PEER_IS_GONE] or own
    ended = [report for report in blamable if report.kind != "raised"]
    busy = [report for report in ended if report.kind == "timeout" and not _stands_waiting(report)]
    return [report for report in ended if report.kind != "timeout"] + busy if busy else ended


def _stands_waiting(report: RankReport) -> bool:
    return report.state == "queued" or _WAITS_FOR_PEERS.search(report.stack) is not None


def _order(report: RankReport) -> tuple[bool, float, int]:
    return report.at is None, report.at or 0.0, report.rank


# Types that would silently end loops and generators of the driver.
_NEVER = (StopIteration, StopAsyncIteration, RankFailure)
# Phalanx's errors that mean the same on a rank and on the driver: both share weights, channels, leases and saves.
_SHARED = (WeightsError, ChannelError, StalenessTimeout, CheckpointError)


def remote_error_type(
    base: type[BaseException], plain: type[RemoteCallError] = RemoteCallError
) -> type[RemoteCallError]:
    """Return a type that derives from `plain` and `base`, or `plain` itself.

    `plain` is returned if `base` is not an `Exception` (KeyboardInterrupt, SystemExit, asyncio.CancelledError), for
    StopIteration and StopAsyncIteration, and for phalanx's own errors: a `GroupClosed` of another group, raised inside
    a worker, does not concern the called group. Errors about state that driver and ranks share (weights, channels,
    leases, saves) keep their type. If `base` is such a combined type, its remote type is used. The result is cached.
    """
    base = getattr(base, "_phalanx_base", base)
    if (
        not issubclass(base, Exception)
        or issubclass(base, _NEVER)
        or (issubclass(base, PhalanxError) and not issubclass(base, _SHARED))
        or issubclass(plain, base)
    ):
        return plain
    return _dual_type(base, plain)


def remote_error(
    plain: type[RemoteCallError], message: str, *, group: str, method: str, failures: tuple[RankReport, ...]
) -> RemoteCallError:
    """Return an error of type `plain`; if possible, it is also an instance of the first cause's exception type."""
    error = plain(message, group=group, method=method, failures=failures)
    parts = _remote_parts(error)
    if parts is None:
        return error
    cls = remote_error_type(parts.cls, plain)
    if cls is plain:
        return error
    try:
        return _checked(_dual(cls, parts, error))
    except Exception:
        # The user's class may reject anything; the plain error has the same text.
        return error


def _remote_parts(error: RemoteCallError) -> Parts | None:
    """Return the exception of the first cause; for a remote error of another group, the original exception."""
    raised = [report for report in error.causes if report.kind == "raised"]
    if not raised:
        return None
    parts = load_parts(raised[0].exception_bytes)
    if parts is not None and isinstance(parts.whole, RemoteCallError):
        return _remote_parts(parts.whole)
    return parts


@functools.lru_cache(maxsize=512)
def _dual_type(base: type[Exception], plain: type[RemoteCallError]) -> type[RemoteCallError]:
    name = f"{plain.__name__}[{base.__name__}]"
    # The base may be frozen, unhashable or compared by value: restore the behavior of plain exceptions.
    members: dict[str, Any] = {
        "__doc__": f"A {plain.__name__} that is also the {base.__qualname__} which a worker raised.",
        "__module__": plain.__module__,
        "__qualname__": name,
        "_phalanx_base": base,
        "__setattr__": object.__setattr__,
        "__delattr__": object.__delattr__,
        "__eq__": object.__eq__,
        "__ne__": object.__ne__,
        "__hash__": object.__hash__,
        "__bool__": lambda self: True,
        "__reduce__": _reduce,
        "__reduce_ex__": lambda self, protocol: _reduce(self),
    }
    try:
        made = types.new_class(name, (plain, base), exec_body=lambda space: space.update(members))
    except Exception:
        # Incompatible layouts or metaclasses, or a class that forbids subclasses.
        return plain
    return made if issubclass(made, plain) and issubclass(made, base) else plain


def _dual(cls: type[RemoteCallError], parts: Parts, error: RemoteCallError) -> RemoteCallError:
    dual = assemble(cls, parts)
    if parts.whole is not None:  # an error of phalanx, which has fields
        dual.__dict__.update(parts.whole.__dict__)
    dual.__dict__.update(error.__dict__)
    if isinstance(dual, SyntaxError):
        # Python prints the fields of a SyntaxError and not its text.
        notes: Any = dual.__dict__.get("__notes__", ())
        dual.__dict__["__notes__"] = [*notes, str(error)]
    if not isinstance(dual, RemoteCallError):
        raise TypeError(f"{cls.__name__} did not give an instance of itself")
    return dual


def _checked(dual: RemoteCallError) -> RemoteCallError:
    """Return the error if repr, str, hash, bool and `with_traceback` work, which the user's class may break."""
    for use in (repr, str, hash, bool, lambda error: error.with_traceback(None)):
        use(dual)
    if str(dual) != dual.__dict__["_phalanx_text"] or not isinstance(dual.args, tuple):
        raise TypeError(f"{type(dual).__name__} hides what an error of phalanx says")
    return dual


def _reduce(dual: RemoteCallError) -> tuple[Callable[..., RemoteCallError], tuple[Any, ...]]:
    plain = next(
        c for c in type(dual).__mro__ if "_phalanx_base" not in vars(c) and issubclass(c, RemoteCallError)
    )
    fields = {"message": str(dual), "group": dual.group, "method": dual.method, "failures": dual.failures}
    return _restore, (plain, fields, tuple(dual.__dict__.get("__notes__", ())))


def _restore(plain: type[RemoteCallError], fields: dict[str, Any], notes: tuple[str, ...]) -> RemoteCallError:
    error = remote_error(plain, **fields)
    if notes:
        error.__dict__["__notes__"] = list(notes)
    return error
