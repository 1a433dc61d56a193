"""What one rank writes of a trace: a file of its own, a line per event.

Each line is out of the process as soon as it is written, so that what a rank did is known also when it hangs or was
killed in the middle. The driver reads the file from beside the rank.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from phalanx.tracing.events import Part, Span, TrackKey

_LIMIT = 1 << 30  # bytes: a trace that nobody ends must not fill the disk
_TEXT = 300
_log = logging.getLogger("phalanx")

#: Line kinds.
IN, RUN, OUT, ENTER, LEAVE, COUNT, FULL = "in", "run", "out", "enter", "leave", "count", "full"


def path_of(files: str, trace: str) -> str:
    """The file in which a rank writes of one trace; ``files`` is how the names of its files begin."""
    return f"{files}.{trace}.events"


def describe(error: BaseException) -> str:
    """Type and first line of an error, not too long."""
    first = next(iter(str(error).splitlines()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


def plain(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes as JSON has them; what it does not know, as text. NaN is one of those."""
    return {key: value if _is_plain(value) else _short(value) for key, value in attributes.items()}


_PLAIN = (bool, int, float, str, type(None))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and (type(value) is not float or math.isfinite(value))


def _short(value: Any) -> str:
    try:
        text = str(value)
    except Exception as error:  # a user's __str__ must not end the user's work
        text = f"<{type(value).__name__}: {describe(error)}>"
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


class SpanWriter:
    """The file of one rank and one trace. A journal that cannot be written says so once, and then writes nothing."""

    def __init__(self, path: str) -> None:
        self._left = _LIMIT
        self._numbers = itertools.count(1)
        self._fd: int | None = None
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            _log.warning("this rank's part of the trace is lost: %s cannot be written: %s", path, error)

    def write(self, *values: Any) -> None:
        """Add one line."""
        self.put(json.dumps(values, separators=(",", ":")))

    def put(self, text: str) -> None:
        """Add lines that are JSON already."""
        if self._fd is None:
            return
        line = text.encode() + b"\n"
        self._left -= len(line)
        try:
            if self._left < 0:
                os.write(self._fd, json.dumps([FULL]).encode() + b"\n")
                self.close()
            else:
                os.write(self._fd, line)
        except OSError as error:
            _log.warning("the rest of this rank's part of the trace is lost: %s", error)
            self.close()

    def close(self) -> None:
        """Write nothing more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def enter(self, name: str, attributes: dict[str, Any], call: int | None = None) -> int:
        """Note that a span begins; the number to give to :meth:`leave`."""
        number = next(self._numbers)
        self.write(ENTER, number, call, time.time_ns(), name, plain(attributes))
        return number

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Note how much there is of something from now on."""
        self.write(COUNT, time.time_ns(), name, dict(values))

    def leave(self, number: int, error: BaseException | None) -> None:
        """Note that a span ends."""
        self.write(LEAVE, number, time.time_ns(), None if error is None else describe(error))


class Noted:
    """A call that a rank is at, as its rank's journal hears of it: a context manager around the call.

    Its three lines are put together by hand, and the first is written with the second where the call does not have to
    wait for arguments (``waits``): a call of 10 ms is to notice nothing of them.
    """

    def __init__(self, journal: SpanWriter, number: int, *, waits: bool = True) -> None:
        self._journal = journal
        self._number = number
        self._waits = waits
        self._held = ""  # a line that is yet to be written
        self._finished: int | None = None
        self._result_bytes = 0
        self._items: int | None = None
        self._token: Token[Noted | None] | None = None

    def __enter__(self) -> Noted:
        line = f'["{IN}",{self._number},{time.time_ns()}]'
        if self._waits:
            self._journal.put(line)
        else:
            self._held = line + "\n"
        self._token = current.set(self)
        return self

    def started(self, nbytes: int) -> None:
        """The arguments are there, ``nbytes`` of them were decoded; the method begins."""
        self._put(f'["{RUN}",{self._number},{time.time_ns()},{nbytes}]')

    def _put(self, line: str) -> None:
        held, self._held = self._held, ""
        self._journal.put(held + line)

    def finished(self) -> None:
        """The method is over."""
        self._finished = time.time_ns()

    def returned(self, nbytes: int) -> None:
        """Its output is encoded."""
        self._result_bytes = nbytes

    def yielded(self, items: int) -> None:
        """So many items went out one by one."""
        self._items = items

    def enter(self, name: str, attributes: dict[str, Any]) -> int:
        """As :meth:`SpanWriter.enter`, in this call."""
        return self._journal.enter(name, attributes, self._number)

    def leave(self, number: int, error: BaseException | None) -> None:
        """As :meth:`SpanWriter.leave`."""
        self._journal.leave(number, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = time.time_ns()
        finished = self._finished if self._finished is not None else now
        text = "null" if error is None else json.dumps(describe(error))
        items = "" if self._items is None else f",{self._items}"
        self._put(f'["{OUT}",{self._number},{finished},{now},{self._result_bytes},{text}{items}]')
        if self._token is not None:
            current.reset(self._token)


#: The call in which this thread or task is, on a rank that is traced.
current: ContextVar[Noted | None] = ContextVar("phalanx_traced_call", default=None)


@dataclass
class Reading:
    """What a rank's file said: its part of each call by number, its spans, and what it counted when, on the clock of
    its host."""

    parts: dict[int, Part] = field(default_factory=dict[int, Part])
    spans: list[Span] = field(default_factory=list[Span])
    counts: list[tuple[str, int, dict[str, float]]] = field(
        default_factory=list[tuple[str, int, dict[str, float]]]
    )
    full: bool = False


def read(lines: Iterable[bytes], track: TrackKey) -> Reading:
    """Read the lines of a journal; one that was cut off, as by the end of its process, is left out."""
    reading = Reading()
    open_spans: dict[int, int] = {}
    for record in _records(lines):
        match record:
            case ["in", number, at, *_]:
                reading.parts[number] = Part(track.rank, received=at)
            case ["run", number, at, nbytes] if number in reading.parts:
                part = reading.parts[number]
                reading.parts[number] = replace(part, started=at, argument_bytes=nbytes)
            case ["out", number, finished, returned, nbytes, error, *items] if number in reading.parts:
                part = reading.parts[number]
                began = part.started is not None
                reading.parts[number] = replace(
                    part,
                    finished=finished if began else None,
                    returned=returned,
                    result_bytes=nbytes,
                    error=error,
                    items=items[0] if items else None,
                )
            case ["enter", number, call, at, name, attributes]:
                open_spans[number] = len(reading.spans)
                reading.spans.append(Span(name, at, None, track, call, attributes))
            case ["leave", number, at, error] if number in open_spans:
                index = open_spans.pop(number)
                reading.spans[index] = replace(reading.spans[index], ended=at, error=error)
            case ["count", at, name, values]:
                reading.counts.append((name, at, values))
            case ["full"]:
                reading.full = True
            case _:
                continue
    return reading


def _records(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
