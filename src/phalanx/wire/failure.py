"""The exception that a failing rank raises: always picklable, with a report of the error."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from phalanx.errors import FailureKind, RankReport, StaleEpoch
from phalanx.wire.exceptions import encodable, pack, text_of, type_name_of, unpack
from phalanx.wire.messages import full_name

UNKNOWN_RANK = -1
"""Rank number of a failure in a process that is not a rank, or not yet."""

_TRACEBACK_LIMIT = 64_000
_MESSAGE_LIMIT = 16_000
_PACKAGE = Path(__file__).parent.parent
_UNPICKLED = (
    "the rank returned, and this process could not unpickle its output: import here what its class needs, or return "
    "plain values, tensors and arrays"
)
_WIRE_CODE = f"{_PACKAGE / 'wire'}{os.sep}"
# Packages with frames before the user's code in a traceback. Paths are unresolved, as those of code objects are.
_BELOW_USERS = "worker backends session pools group calls members api debug"
_LIBRARY_CODE = (
    *(f"{_PACKAGE / package}{os.sep}" for package in _BELOW_USERS.split()),
    f"{Path(os.__file__).parent / 'asyncio'}{os.sep}",
)


class RankFailure(Exception):
    """The failure of a call on a rank. Every process that has phalanx can unpickle it.

    Raise it outside of the `except` block, or `from None`: otherwise the live exception is sent with it.
    """

    def __init__(self, report: RankReport) -> None:
        Exception.__init__(self)
        self.report = report

    def __str__(self) -> str:
        report = self.report
        method = f" in {full_name(report.role or '', report.method or '')}" if report.method else ""
        error = (
            "was cancelled" if report.kind == "cancelled" else f"raised {report.type_name or 'an exception'}"
        )
        head = f"{report.where()} {error}{f': {report.message}' if report.message else ''}{method}"
        return f"{head}\n\n{report.traceback}" if report.traceback else head

    def __reduce__(self) -> tuple[Callable[..., RankFailure], tuple[RankReport]]:
        return type(self), (self.report,)


def capture(
    exc: BaseException,
    *,
    rank: int = UNKNOWN_RANK,
    role: str | None = None,
    method: str | None = None,
    kind: FailureKind = "raised",
    exception_bytes: bytes | None = None,
    **facts: Any,
) -> RankFailure:
    """Return the failure to raise in place of `exc`. Never raises, even if the exception's own methods do.

    Its text can be encoded as UTF-8: a backend writes it where a lone surrogate would end the process. `facts` are
    further fields of the report; `exception_bytes` is the exception to raise on the driver, if not `exc`.
    """
    report = RankReport(
        rank=rank,
        kind=kind,
        role=None if role is None else encodable(role),
        method=None if method is None else encodable(method),
        type_name=encodable(type_name_of(type(exc))),
        message=_shortened(text_of(exc), _MESSAGE_LIMIT),
        traceback=_shortened(traceback_of(exc), _TRACEBACK_LIMIT),
        notes=tuple(_notes(exc)),
        exception_bytes=exception_bytes or pack(exc),
        **facts,
    )
    return RankFailure(report)


def undecodable(exc: BaseException) -> RankFailure:
    """Return the failure of a rank whose method returned, but whose output raised `exc` when unpickled here."""
    exc = exc.with_traceback(_beyond_wire(exc.__traceback__))
    exc.__context__ = None  # the backend's error for an earlier fetch of the same output
    failure = capture(exc, hint=_UNPICKLED)
    message = f"{failure.report.message} (while its output was unpickled)".lstrip()
    return RankFailure(dataclasses.replace(failure.report, message=message))


def stale_call(group: str, method: str, epoch: int, current: int) -> StaleEpoch:
    """Return the error of a call of ``epoch`` to a group that has other ranks in its ``current`` epoch."""
    return StaleEpoch(
        f"group {group!r} was restarted, or has other ranks by now: this call of {method} belongs to epoch {epoch}, "
        f"the group is in epoch {current}; make the call again, on ranks that it has",
        group=group,
        epoch=epoch,
        current=current,
    )


def report_of(failure: RankFailure, *, at: float | None = None) -> RankReport:
    """Return the failure's report with the exception rebuilt; `at` is the time when the failure became known, in s."""
    return dataclasses.replace(failure.report, exception=unpack(failure.report.exception_bytes), at=at)


def traceback_of(exc: BaseException) -> str:
    """Return the traceback from the first frame of user code on, as text with causes, notes and sub-exceptions."""
    start = frames = BaseException.__getattribute__(exc, "__traceback__")
    while start is not None and start.tb_frame.f_code.co_filename.startswith(_LIBRARY_CODE):
        start = start.tb_next
    start = start or frames  # an error of the library itself keeps all frames
    try:
        return "".join(traceback.TracebackException(type(exc), exc, start).format()).rstrip()
    except Exception:
        # Formatting calls methods of the exception, which may raise; the frames do not need these methods.
        lines = "".join(traceback.format_tb(start))
        return f"Traceback (most recent call last):\n{lines}{type_name_of(type(exc))}: {text_of(exc)}"


def _beyond_wire(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames that follow the last frame of this package; all frames if none follow."""
    frame, last = frames, None
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_WIRE_CODE):
            last = frame.tb_next
        frame = frame.tb_next
    return last or frames


def _notes(exc: BaseException) -> Iterator[str]:
    notes: Any = BaseException.__getattribute__(exc, "__dict__").get("__notes__", ())
    if isinstance(notes, list | tuple):
        for note in cast("list[Any]", notes):
            if isinstance(note, str):
                yield _shortened(note, _MESSAGE_LIMIT)


def _shortened(text: str, limit: int) -> str:
    """Return the text, without its middle if it is long: the start names the error, the end the failing line."""
    text = encodable(text)
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 4], text[-(limit - limit // 4) :]
    return f"{head}\n... {len(text) - limit} characters left out ...\n{tail}"
