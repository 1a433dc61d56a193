"""Calls that were made past the library: by handles that are used without a group, with plain arguments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx.errors import DispatchError
from phalanx.tracing.span_writer import Noted
from phalanx.wire.call_page import PLAIN_CALL
from phalanx.wire.method_names import full_name
from phalanx.worker.async_runner import Loop
from phalanx.worker.rank_context import Presence
from phalanx.worker.span_writers import Journals, size_of


class PlainCalls:
    """Of one rank. ``instances`` are its objects by role, as they are made and closed.

    ``traced`` of a call is the trace that it is in, if any, its number there, and the bytes of its arguments; ``pack``
    makes of its result what is sent back.
    """

    def __init__(
        self, instances: Mapping[str, Any], journals: Journals, loop: Loop, presence: Presence
    ) -> None:
        self._instances = instances
        self._journals = journals
        self._loop = loop
        self._presence = presence

    def run(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        traced: tuple[str, int, int] = ("", PLAIN_CALL, 0),
        pack: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Call a method on this thread.

        Raises:
            What the method raises, as it is: the backend's own errors are what such a caller expects.
        """
        with self._noted(role, method, traced) as note:
            result = self._called(role, method, args, kwargs)
            result = self._loop.to_end(result) if isinstance(result, Awaitable) else result
            return _packed(result, note, pack)

    async def run_async(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        traced: tuple[str, int, int] = ("", PLAIN_CALL, 0),
        pack: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """As :meth:`run`, on the running loop."""
        with self._noted(role, method, traced) as note:
            result = self._called(role, method, args, kwargs)
            result = await result if isinstance(result, Awaitable) else result
            return _packed(result, note, pack)

    @contextmanager
    def _noted(self, role: str, method: str, traced: tuple[str, int, int]) -> Generator[Noted | None]:
        """The time of such a call, which nobody can cancel."""
        control = self._presence.control
        page = None if control is None else control.page
        slot = 0 if page is None else page.begin(PLAIN_CALL, full_name(role, method))
        try:
            trace, number, nbytes = traced
            with self._journals.of(trace, number, waits=False) as note:
                if note is not None:
                    note.started(nbytes)
                yield note
        finally:
            if page is not None:
                page.end(slot)

    def _called(self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if role not in self._instances:
            raise DispatchError(
                f"{method}() was called on a worker process in which {role or 'the worker'} was not made, or was "
                "closed; call it once the group has started and before it is closed"
            )
        return getattr(self._instances[role], method)(*args, **kwargs)


def _packed(result: Any, note: Noted | None, pack: Callable[[Any], Any]) -> Any:
    if note is None:
        return pack(result)
    note.finished()
    packed = pack(result)
    note.returned(size_of(packed))
    return packed
