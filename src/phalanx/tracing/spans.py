"""``px.span``: names work of the user in the trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from phalanx.tracing.span_writer import current

F = TypeVar("F", bound=Callable[..., Any])


class SpanSink(Protocol):
    """Receiver of spans: the recorder of this driver, the file of this rank, or a call in it."""

    def enter(self, name: str, attributes: dict[str, Any]) -> int:
        """Record that a span begins; return the number for ``leave``."""
        ...

    def leave(self, number: int, error: BaseException | None) -> None:
        """Record that a span ends."""
        ...


class _Receivers:
    """Receivers of this process, while a trace of this driver, or of this rank's calls, is on."""

    sink: SpanSink | None = None
    """Receives spans outside calls."""
    count: Callable[[str, Mapping[str, float]], None] | None = None
    """Receives counters: a name, and quantities from now on."""


process = _Receivers()


class span:
    """Name work in the trace: ``with px.span("load batch", rows=128): ...``, or ``@px.span("score")``.

    In a worker it is on its rank's track, inside the call around it; elsewhere on the driver's. Functions, also
    ``async`` functions, can be decorated. While no trace is on it costs about a microsecond. An object may be
    entered again, but only by one thread or task at a time; a decorated function has no such limit.

    Args:
        name: of the slice.
        **attributes: shown with it; values other than numbers and text are turned into text.
    """

    __slots__ = ("_attributes", "_name", "_open")

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self._name = name
        self._attributes = attributes
        self._open: list[tuple[SpanSink | None, int]] | None = None  # made when a trace is on

    def __enter__(self) -> span:
        sink = current.get() or process.sink
        if sink is not None:
            self._open = self._open or []
            self._open.append((sink, sink.enter(self._name, self._attributes)))
        elif self._open:
            self._open.append((None, 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        sink, number = self._open.pop()
        if sink is not None:
            sink.leave(number, error)

    def __call__(self, function: F) -> F:
        name, attributes = self._name, self._attributes
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with span(name, **attributes):
                    return await function(*args, **kwargs)

            return awaited  # pyright: ignore[reportReturnType]

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with span(name, **attributes):
                return function(*args, **kwargs)

        return called  # pyright: ignore[reportReturnType]
