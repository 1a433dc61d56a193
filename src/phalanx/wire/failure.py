"""The one exception that a failing host raises: always picklable, with a report of what went wrong."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from phalanx.errors import FailureKind, RankReport
from phalanx.wire.exceptions import encodable, pack, text_of, type_name_of, unpack
from phalanx.wire.method_names import full_name

__all__ = ["UNKNOWN_RANK", "RankFailure", "capture", "rebuild", "report_of", "undecodable"]

UNKNOWN_RANK = -1
"""The rank of a failure that happened before the process had one, or outside of any rank."""

_TRACEBACK_LIMIT = 64_000
_MESSAGE_LIMIT = 16_000
_PACKAGE = Path(__file__).parent.parent
_UNPICKLED = (
    "the rank returned, and this process could not read what it gave back: import here what its class needs, or return "
    "plain values, tensors and arrays"
)
_WIRE_CODE = f"{_PACKAGE / 'wire'}{os.sep}"
# Frames of these lie between the start of a process and the user's code. Not resolved: code objects are not.
_PACKAGES_BELOW_USERS = (
    "worker",
    "backends",
    "session",
    "pools",
    "group",
    "calls",
    "members",
    "api",
    "debug",
)
_HOST_CODE = (
    *(f"{_PACKAGE / package}{os.sep}" for package in _PACKAGES_BELOW_USERS),
    f"{Path(os.__file__).parent / 'asyncio'}{os.sep}",
)


class RankFailure(Exception):
    """What a host raises when a call fails. It pickles in every process that has phalanx.

    Raise it outside of the `except` block, or `from None`: else the live exception travels along.
    """

    def __init__(self, report: RankReport) -> None:
        Exception.__init__(self)
        self.report = report

    @property
    def exception_bytes(self) -> bytes | None:
        """The exception, packed; None where it cannot travel."""
        return self.report.exception_bytes

    def __str__(self) -> str:
        report = self.report
        method = f" in {full_name(report.role or '', report.method or '')}"
        head = f"{report.where()} raised {described(report)}" + (method if report.method else "")
        return f"{head}\n\n{report.traceback}" if report.traceback else head

    def __reduce__(self) -> tuple[Callable[..., RankFailure], tuple[RankReport]]:
        return type(self), (self.report,)


def described(report: RankReport) -> str:
    """`ValueError: bad shape`, or the type alone where there is no text."""
    name = report.type_name or "an exception"
    return f"{name}: {report.message}" if report.message else name


def capture(
    exc: BaseException,
    *,
    rank: int = UNKNOWN_RANK,
    role: str | None = None,
    method: str | None = None,
    host: str | None = None,
    pid: int | None = None,
    accelerator: str | None = None,
    node_id: str | None = None,
    kind: FailureKind = "raised",
    hint: str | None = None,
    log_tail: Sequence[str] = (),
    log_path: str | None = None,
) -> RankFailure:
    """The failure to raise in place of `exc`. Never raises, whatever the exception's own methods do.

    All text in it can be encoded: a backend writes it where a lone surrogate would end the process.
    """
    report = RankReport(
        rank=rank,
        kind=kind,
        role=None if role is None else encodable(role),
        method=None if method is None else encodable(method),
        host=host,
        pid=pid,
        accelerator=accelerator,
        node_id=node_id,
        type_name=encodable(type_name_of(type(exc))),
        message=_shortened(text_of(exc), _MESSAGE_LIMIT),
        traceback=_shortened(traceback_of(exc), _TRACEBACK_LIMIT),
        notes=tuple(_notes(exc)),
        hint=hint,
        log_tail=tuple(log_tail),
        log_path=log_path,
        exception_bytes=pack(exc),
    )
    return RankFailure(report)


def undecodable(exc: BaseException) -> RankFailure:
    """The failure of a rank that returned, but whose output cannot be unpickled in this process: ``exc`` says why."""
    exc = exc.with_traceback(_beyond_wire(exc.__traceback__))
    exc.__context__ = None  # the backend's own error of a fetch before, which was this one
    failure = capture(exc, hint=_UNPICKLED)
    message = f"{failure.report.message} (while its output was unpickled)".lstrip()
    return RankFailure(dataclasses.replace(failure.report, message=message))


def rebuild(failure: RankFailure) -> BaseException | None:
    """The exception as it was raised, or None where its class or its content is not to be had here."""
    return unpack(failure.exception_bytes)


def report_of(failure: RankFailure, *, at: float | None = None) -> RankReport:
    """The failure's report with the exception rebuilt; `at` is when it became known, in seconds."""
    return dataclasses.replace(failure.report, exception=rebuild(failure), at=at)


def traceback_of(exc: BaseException) -> str:
    """The traceback as text, with causes, notes and sub-exceptions, from the first frame of user code on."""
    start = _user_code(BaseException.__getattribute__(exc, "__traceback__"))
    try:
        return "".join(traceback.TracebackException(type(exc), exc, start).format()).rstrip()
    except Exception:
        # Formatting calls methods of the exception; the frames at least can be had without them.
        frames = "".join(traceback.format_tb(start))
        head = "Traceback (most recent call last):\n"
        return f"{head}{frames}{type_name_of(type(exc))}: {text_of(exc)}"


def _user_code(frames: TracebackType | None) -> TracebackType | None:
    """Skips the host's own frames; an error of the host itself keeps them all."""
    frame = frames
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_HOST_CODE):
        frame = frame.tb_next
    return frame or frames


def _beyond_wire(frames: TracebackType | None) -> TracebackType | None:
    """What was run by unpickling, without the way there; all frames where that is nothing."""
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
    """Long text without its middle: the start says what, the end of a traceback says where."""
    text = encodable(text)
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 4], text[-(limit - limit // 4) :]
    return f"{head}\n... {len(text) - limit} characters left out ...\n{tail}"
