"""Results of the inline backend: values, and the items of a method that yields."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from phalanx.backends.backend_types import FetchFailed, Lost, RankOutcome
from phalanx.errors import CallCancelled
from phalanx.wire.codec import Encoded
from phalanx.wire.failure import RankFailure, capture, undecodable
from phalanx.wire.messages import StreamEnd
from phalanx.wire.value import Value


class InlineRef:
    """A stored value or a failure. Encoded values are kept as bytes, so each reader decodes its own copy."""

    __slots__ = ("_encoded", "_value", "failure", "lost")

    def __init__(
        self, value: Value = None, failure: RankFailure | None = None, lost: Lost | None = None
    ) -> None:
        self._encoded = isinstance(value, Encoded)
        self._value = pickle.dumps(value, 5) if self._encoded else value
        self.failure = failure
        self.lost = lost

    def get(self) -> Value:
        if self.failure is not None:
            raise self.failure
        if self.lost is not None:
            raise FetchFailed(self.lost.reason)
        return pickle.loads(self._value) if self._encoded else self._value

    @property
    def is_last(self) -> bool:
        """True if this is the last reference of a stream."""
        return (
            self.failure is not None
            or self.lost is not None
            or isinstance(self._value, StreamEnd | RankFailure)
        )


def fetched(refs: Sequence[Any]) -> list[Any]:
    """Return the values behind references. Raises FetchFailed."""
    try:
        return [ref.get() for ref in refs]
    except FetchFailed:
        raise
    except Exception as error:  # RankFailure, or an error of unpickling
        raise FetchFailed from error


def outcome_of(ref: Any) -> RankOutcome:
    """Return the outcome of the call of a reference."""
    if ref.failure is not None or ref.lost is not None:
        return RankOutcome(failure=ref.failure, lost=ref.lost)
    try:
        return RankOutcome(ref.get())
    except Exception as error:
        return RankOutcome(failure=undecodable(error))


class Unended:
    """The end of a stream, for ``wait``. The call is in flight until its last item is taken."""

    under_way = True


class InlineStream:
    """A call that runs on to its next item when that is taken, on the thread that takes it.

    ``step(work)`` runs a function as the rank, and returns a reference to its result.
    """

    def __init__(self, items: Iterator[Any], step: Callable[[Callable[[], Any]], InlineRef]) -> None:
        self._items: Iterator[Any] | None = items
        self._step = step
        self._context = copy_context()  # of its own: steps of other calls come in between
        self._begun = False
        self._end: InlineRef | None = None
        self.ended = Unended()

    @property
    def coming(self) -> InlineRef:
        return InlineRef()

    def take(self) -> InlineRef | None:
        if self._end is not None:
            end, self._end = self._end, None
            return end
        if self._items is None:
            return None
        items, self._begun = self._items, True
        ref = self._step(lambda: self._context.run(next, items))
        if ref.is_last:
            self._over()
        return ref

    def leave(self) -> None:
        items = self._items
        if items is None:
            return
        self._end = InlineRef(failure=capture(CallCancelled("had not begun it"), kind="cancelled"))
        if self._begun:
            self._end = self._step(lambda: self._context.run(_closed, items))
        self._over()

    def _over(self) -> None:
        items, self._items = self._items, None
        self.ended.under_way = False
        with suppress(Exception):  # the rank has ended: errors of its method cannot be reported
            self._context.run(_closed, items)

    def __del__(self) -> None:
        if self._items is not None:
            self._over()


def _closed(items: Any) -> StreamEnd:
    items.close()
    return StreamEnd(0)
