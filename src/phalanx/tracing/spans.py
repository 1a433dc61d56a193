"""``px.span``, the file of a process in a trace, with a line per event, and the reader of such files.

Files are unbuffered, so that the events of a rank that hangs or was killed are known too. The driver reads the files
of ranks without their help, and has a file of its own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from phalanx.tracing.events import RankSpan, Span, TrackKey
from phalanx.wire.exceptions import text_of

F = TypeVar("F", bound=Callable[..., Any])
_LIMIT = 1 << 30  # bytes: a trace that is never ended must not fill the disk
_TEXT = 300
_log = logging.getLogger("phalanx")


class _Receiver:
    """Holder of the file for spans and counters, ``sink``, while a trace of this driver or of this rank is on."""

    sink: SpanWriter | None = None


process = _Receiver()


class span:
    """A named span of work in the trace: ``with px.span("load batch", rows=128): ...``, or ``@px.span("score")``.

    In a worker, the span is on the rank's track, inside the current call; elsewhere it is on the driver's track. Plain,
    ``async`` and generator functions can be decorated. Without a trace, a span costs about a microsecond. An object
    may be entered again, but only by a single thread or task at a time; a decorated function has no such limit.

    Args:
        name: name of the slice.
        **attributes: values shown with the slice; values other than numbers and text are converted to text.
    """

    __slots__ = ("_attributes", "_name", "_open")

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self._name = name
        self._attributes = attributes
        self._open: list[tuple[SpanWriter | None, int]] = []

    def __enter__(self) -> span:
        call = current.get()
        sink = process.sink if call is None else call.writer
        number = 0
        if sink is not None:
            number = sink.enter(self._name, self._attributes, None if call is None else call.number)
        self._open.append((sink, number))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sink, number = self._open.pop()
        if sink is not None:
            sink.leave(number, error)

    def __call__(self, function: F) -> F:
        name, attributes = self._name, self._attributes

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with span(name, **attributes):
                return await function(*args, **kwargs)

        def called(*args: Any, **kwargs: Any) -> Any:
            with span(name, **attributes):
                return function(*args, **kwargs)

        def yielding(*args: Any, **kwargs: Any) -> Any:
            with span(name, **attributes):
                return (yield from function(*args, **kwargs))

        async def yielding_async(*args: Any, **kwargs: Any) -> Any:
            with span(name, **attributes):
                async with aclosing(function(*args, **kwargs)) as items:
                    step = items.asend(None)
                    with suppress(StopAsyncIteration):
                        while True:
                            item = await step
                            try:
                                step = items.asend((yield item))
                            except GeneratorExit:
                                raise
                            except BaseException as error:
                                step = items.athrow(error)

        wrapper = awaited if inspect.iscoroutinefunction(function) else called
        wrapper = yielding if inspect.isgeneratorfunction(function) else wrapper
        wrapper = yielding_async if inspect.isasyncgenfunction(function) else wrapper
        return functools.wraps(function)(wrapper)  # pyright: ignore[reportReturnType]


def path_of(files: str, trace: str) -> str:
    """Return the path of a rank's file for a trace; ``files`` is the prefix of the paths of the rank's files."""
    return f"{files}.{trace}.events"


def describe(error: BaseException) -> str:
    """Return type and first line of an error."""
    first = next(iter(text_of(error).splitlines()), "")
    return _cut(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _plain(value: Any) -> bool | int | float | str | None:
    """Return a value that JSON allows: numbers below 1e300, booleans, text and None unchanged, others as text."""
    if type(value) in (bool, str, type(None)) or (type(value) in (int, float) and abs(value) < 1e300):
        return value
    try:
        return _cut(str(value))
    except Exception as error:  # a faulty __str__ must not fail the user's work
        return f"<{type(value).__name__}: {describe(error)}>"


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + "..."


class SpanWriter:
    """The file of a rank or a driver for a trace. If it cannot be written, a warning is logged once.

    Args:
        path: path of the file; by default an unnamed file, which ends with this process.
    """

    def __init__(self, path: str | None = None) -> None:
        self._left = _LIMIT
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._file: Any = None
        try:
            if path is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # open until __del__()
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # open until __del__()
        except OSError as error:
            _log.warning("this process's part of the trace is lost: %s cannot be written: %s", path, error)

    def write(self, *values: Any) -> None:
        """Write values as a line of JSON."""
        self.put(json.dumps(values, separators=(",", ":")))

    def put(self, text: str) -> None:
        """Write a line that is JSON already."""
        if self._file is None or self._left < 0 or self._pid != os.getpid():
            return  # a forked process would number its spans as this one does
        line = text.encode() + b"\n"
        self._left -= len(line)
        try:
            self._file.write(line if self._left >= 0 else b'["full"]\n')
        except OSError as error:
            _log.warning("the rest of this process's part of the trace is lost: %s", error)
            self._left = -1

    def read(self) -> bytes:
        """Return the content of the unnamed file."""
        return b"" if self._file is None else os.pread(self._file.fileno(), self._file.tell(), 0)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def enter(self, name: str, attributes: dict[str, Any], call: int | None = None) -> int:
        """Record that a span begins, in the rank's call number ``call``; return the number for :meth:`leave`."""
        number = next(self._numbers)
        plain = {key: _plain(value) for key, value in attributes.items()}
        self.write("enter", number, call, time.time_ns(), name, plain)
        return number

    def leave(self, number: int, error: BaseException | None) -> None:
        """Record that a span ends, with its error."""
        self.write("leave", number, time.time_ns(), None if error is None else describe(error))

    def count(self, name: str, values: Mapping[str, float]) -> None:
        """Record the values of a counter from now on."""
        self.write("count", time.time_ns(), name, dict(values))


class CallSpan:
    """Context manager around a call on a rank, which records the call in the rank's file.

    Its three lines are formatted by hand: a traced call of 10 ms should take only a few percent longer.
    """

    def __init__(self, writer: SpanWriter, number: int) -> None:
        self.writer = writer
        self.number = number
        self._finished: int | None = None
        #: Bytes of the encoded output, and the number of streamed items.
        self.result_bytes = 0
        self.items: int | None = None

    def __enter__(self) -> CallSpan:
        self.writer.put(f'["in",{self.number},{time.time_ns()}]')
        self._token = current.set(self)
        return self

    def started(self, nbytes: int) -> None:
        """Record that the method begins, with arguments of ``nbytes`` decoded bytes."""
        self.writer.put(f'["run",{self.number},{time.time_ns()},{nbytes}]')

    def finished(self) -> None:
        """Record that the method ended."""
        self._finished = time.time_ns()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        current.reset(self._token)
        now = time.time_ns()
        finished = self._finished if self._finished is not None else now
        text = "null" if error is None else json.dumps(describe(error))
        items = "" if self.items is None else f",{self.items}"
        self.writer.put(f'["out",{self.number},{finished},{now},{self.result_bytes},{text}{items}]')


#: The traced call of this thread or task, on a rank.
current: ContextVar[CallSpan | None] = ContextVar("phalanx_traced_call", default=None)


@dataclass
class SpanLog:
    """Content of a process's file, by the clock of its host.

    ``parts`` are parts of calls by call number; ``counts`` are name, time and values of counters. ``full`` is True if
    the file reached its size limit.
    """

    parts: dict[int, RankSpan] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    counts: list[tuple[str, int, dict[str, float]]] = field(default_factory=list)
    full: bool = False


def read_log(lines: Iterable[bytes], track: TrackKey | None = None) -> SpanLog:
    """Read the lines of a rank's file, or of the driver's if ``track`` is None.

    Incomplete lines, such as the last line of a killed process, are left out.
    """
    log = SpanLog()
    parts, spans = log.parts, log.spans
    open_spans: dict[int, int] = {}
    for line in lines:
        try:
            record: Any = json.loads(line)
        except ValueError:
            continue
        match record:
            case ["in", number, at, *_] if track is not None:
                parts[number] = RankSpan(track.rank, received=at)
            case ["run", number, at, nbytes] if number in parts:
                parts[number].started, parts[number].argument_bytes = at, nbytes
            case ["out", number, finished, returned, nbytes, error, *items] if number in parts:
                part = parts[number]
                part.finished = None if part.started is None else finished
                part.returned, part.result_bytes, part.error = returned, nbytes, error
                part.items = items[0] if items else None
            case ["enter", number, call, at, name, attributes]:
                open_spans[number] = len(spans)
                spans.append(Span(name, at, None, track, call, attributes))
            case ["leave", number, at, error] if number in open_spans:
                index = open_spans.pop(number)
                spans[index] = replace(spans[index], ended=at, error=error)
            case ["count", at, name, values]:
                log.counts.append((name, at, values))
            case _:  # unknown, or the last line of a file that is full
                log.full = log.full or record == ["full"]
    return log
