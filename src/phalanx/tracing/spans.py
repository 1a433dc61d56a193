"""``px.span``: a stretch of the user's own work in the trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from phalanx.tracing.span_writer import current

F = TypeVar("F", bound=Callable[..., Any])


class Sink(Protocol):
    """Who hears of spans."""

    def enter(self, name: str, attributes: dict[str, Any]) -> int:
        """Note that a span begins; the number to give to ``leave``."""
        ...

    def leave(self, number: int, error: BaseException | None) -> None:
        """Note that a span ends."""
        ...


class _Process:
    """Who hears of spans that lie in no call: the trace of this driver, the journal of this rank, or nobody."""

    sink: Sink | None = None
    count: Callable[[str, Mapping[str, float]], None] | None = None
    """Hears how much there is of something, by name, while a trace of this driver, or of this rank's calls, is on."""


process = _Process()


class span:
    """Name a stretch of work in the trace: ``with px.span("load batch", rows=128): ...``, or ``@px.span("score")``.

    In a worker it lies on its rank's track, inside the call that it is in; elsewhere on the driver's. Functions,
    ``async`` ones too, can be decorated. While no trace is on it costs about a microsecond. One object may be
    entered again, but only by one thread or task at a time; what it decorates has no such limit.

    Args:
        name: what the slice is called.
        **attributes: shown with it; anything but numbers and text is turned into text.
    """

    __slots__ = ("_attributes", "_name", "_open")

    def __init__(self, name: str, /, **attributes: Any) -> None:
        self._name = name
        self._attributes = attributes
        self._open: list[tuple[Sink | None, int]] | None = None  # made when somebody hears of it

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
