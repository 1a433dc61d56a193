"""Combine the reports of all ranks that failed in a call into a single error. Pure.

If a rank fails, its peers fail too: their collectives lose a connection, or they are stopped. This module distinguishes
*causes*, ranks that failed by themselves, and *victims*.

The error is also an instance of the worker's exception type: its type is made at run time from both. The instance gets
the arguments and attributes of the remote exception without running any code of its class; text, pickling and identity
are those of phalanx. If any of this fails, the error is a plain `RemoteCallError` with the same text.
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
from phalanx.wire.exceptions import Parts, assemble, load_parts
from phalanx.wire.failure import RankFailure, rebuild

# Messages of gloo, NCCL, HCCL and the c10d store on the ranks that were left waiting. Sources: gloo
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
# Types in which torch.distributed raises them; other code does not raise a bare RuntimeError with such words.
_OF_A_COLLECTIVE = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
_COLLECTIVE_FRAME = re.compile(
    r"torch[/\\]distributed[/\\]|ProcessGroup|third_party[/\\]gloo|c10d", re.IGNORECASE
)
# Raised by a rank that lost its peer in a sync of weights.
_SYNC_PEER_IS_GONE = f"{WeightsTransferError.__module__}.{WeightsTransferError.__qualname__}"
# A frame of a process that waits for its peers, as faulthandler and traceback write it.
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

    A rank that refused the call, since it is of another epoch, makes it a `StaleEpoch`, whatever the other reports say.
    A rank that died by itself makes it a `WorkerDiedError`; a rank that raised, a `RemoteCallError` (with `init` a
    `WorkerInitError`), also an instance of the first cause's type; else a missed deadline, `timeout` in seconds, a
    `CallTimeout`; else a `CallCancelled`. `reports` are the reports of all known ranks, in any order; their `at` tells
    which rank failed first.

    Raises:
        InternalError: no report is of a failure.
    """
    if not any(report.failed for report in reports):
        raise InternalError(f"the call {method} on group {group!r} failed, but no rank reported a failure")
    failures = with_victims(reports)
    causes = [report for report in failures if report.failed and not report.victim]
    kinds = {report.kind for report in causes}
    for report in causes:
        if report.kind == "stale" and isinstance(stale := rebuild(RankFailure(report)), StaleEpoch):
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
    """Return the reports with `victim` decided: causes first, then victims, then ranks that had finished.

    Within each, the earliest comes first. There is always a cause: if all look like victims, it is the first rank that
    failed rather than was stopped.
    """
    failed = sorted((report for report in reports if report.failed), key=_order)
    causes = sorted(_causes(failed), key=_order)
    if not causes and failed:
        causes = [min(failed, key=lambda report: (report.kind == "stopped", *_order(report)))]
    # By identity: equal reports of different processes are still different ranks' reports.
    ids = {id(report) for report in causes}
    victims = [dataclasses.replace(report, victim=True) for report in failed if id(report) not in ids]
    finished = sorted((report for report in reports if not report.failed), key=_order)
    own = (dataclasses.replace(report, victim=False, cut_off=is_cut_off(report)) for report in causes)
    return (*own, *victims, *finished)


def looks_like_victim(report: RankReport) -> bool:
    """Return whether the exception of a rank says that a peer was lost, and comes from a collective."""
    if report.kind != "raised":
        return False
    if _PEER_IS_GONE.search(report.message) is None:
        return _chained_from_collective(report)
    name = (report.type_name or "").rpartition(".")[2]
    return name in _OF_A_COLLECTIVE or _COLLECTIVE_FRAME.search(report.traceback) is not None


def tells_of_a_peer(report: RankReport) -> bool:
    """Return whether a rank failed because another rank was lost, as far as its report shows."""
    return report.type_name == _SYNC_PEER_IS_GONE or looks_like_victim(report)


def is_cut_off(report: RankReport) -> bool:
    """Return whether the exception of a rank, from a collective, says that a connection to a peer was lost."""
    said = f"{report.message}\n{report.traceback}"
    return looks_like_victim(report) and _CONNECTION_IS_GONE.search(said) is not None


def _chained_from_collective(report: RankReport) -> bool:
    """Return whether the exception was raised `from` a collective's exception, as wrappers of training loops do."""
    if not any(f"{name}: " in report.traceback for name in _OF_A_COLLECTIVE):
        return False
    return any(
        line.partition(":")[0].rpartition(".")[2] in _OF_A_COLLECTIVE
        and _PEER_IS_GONE.search(line) is not None
        for line in report.traceback.splitlines()
        if not line.startswith(" ")
    )


def _causes(failed: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks whose own code, or the loss of whose process, ended their part of the call.

    Without such ranks, return the ranks that were cancelled, or missed the deadline, except for late ranks in a
    collective or in the queue while other late ranks were busy with something else.
    """
    blamable = [report for report in failed if not report.victim and report.kind != "stopped"]
    own = [
        each
        for each in blamable
        if each.kind == "died" or (each.kind == "raised" and not looks_like_victim(each))
    ]
    if own:  # a peer of a sync went away, for a reason that may be among the others
        return [each for each in own if each.type_name != _SYNC_PEER_IS_GONE] or own
    ended = [report for report in blamable if report.kind != "raised"]
    busy = [report for report in ended if report.kind == "timeout" and not _stands_waiting(report)]
    return [report for report in ended if report.kind != "timeout"] + busy if busy else ended


def _stands_waiting(report: RankReport) -> bool:
    return report.state == "queued" or _WAITS_FOR_PEERS.search(report.stack) is not None


def _order(report: RankReport) -> tuple[bool, float, int]:
    return report.at is None, report.at or 0.0, report.rank


# On the driver these would end its own loops and generators in silence, not report a failure.
_NEVER = (StopIteration, StopAsyncIteration, RankFailure)
# Of phalanx's own errors those that say the same to whoever called: weights, channels, leases and saves are shared
# with ranks.
_SHARED = (WeightsError, ChannelError, StalenessTimeout, CheckpointError)


def remote_error_type(
    base: type[BaseException], plain: type[RemoteCallError] = RemoteCallError
) -> type[RemoteCallError]:
    """Return the type that derives from `plain` and from `base`, or `plain` itself.

    `plain` is returned if `base` is no `Exception` (KeyboardInterrupt, SystemExit, asyncio.CancelledError), for
    StopIteration and its like, and for phalanx's own errors: a `GroupClosed` of some other group, met inside a worker,
    says nothing about the group that was called. Errors about state that driver and ranks share (weights, channels,
    leases, saves) keep their type. Of an error that came from a further group, the remote type in it counts. The same
    arguments return the same type.
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
    """An error of type `plain`, where possible also of the type that the first of the causes raised."""
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
        # The class reads or refuses something that we cannot know: the text says all that the type would.
        return error


def _remote_parts(error: RemoteCallError) -> Parts | None:
    """Return the exception of the first cause; errors of further groups are followed to their original exception."""
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
    # Frozen dataclasses refuse attributes, others are unhashable or compare by value: all of that is undone.
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
        # Layouts or metaclasses that do not go together, or a class that forbids subclasses.
        return plain
    return made if issubclass(made, plain) and issubclass(made, base) else plain


def _dual(cls: type[RemoteCallError], parts: Parts, error: RemoteCallError) -> RemoteCallError:
    dual = assemble(cls, parts)
    if parts.whole is not None:  # an error of phalanx, with its fields next to its text
        dual.__dict__.update(parts.whole.__dict__)
    dual.__dict__.update(error.__dict__)
    if isinstance(dual, SyntaxError):
        # Python prints the fields of a SyntaxError in place of its text.
        notes: Any = dual.__dict__.get("__notes__", ())
        dual.__dict__["__notes__"] = [*notes, str(error)]
    if not isinstance(dual, RemoteCallError):
        raise TypeError(f"{cls.__name__} did not give an instance of itself")
    return dual


def _checked(dual: RemoteCallError) -> RemoteCallError:
    """Use it as a driver would; any error of the class's own code shows here and not there."""
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
