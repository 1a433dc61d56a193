"""The calls of a group that nobody has seen the end of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from phalanx.calls.in_flight import InFlightCalls


class Stream:
    """A call that streams, and is asked whether it is over."""

    def __init__(self, when_asked: Callable[[], None] = lambda: None) -> None:
        self._when_asked = when_asked

    @property
    def over(self) -> bool:
        self._when_asked()
        return False


def test_streams_that_two_threads_begin_at_once_are_both_known() -> None:
    under_way = InFlightCalls()
    others: list[Any] = [Stream()]
    other = threading.Thread(target=under_way.add_stream, args=others)

    def the_other_begins() -> None:
        if other.ident is None:
            other.start()
            while other.is_alive() and not waits_for(under_way):
                pass

    first: Any = Stream(the_other_begins)
    under_way.add_stream(first)
    last: Any = Stream()
    under_way.add_stream(last)
    other.join()
    assert {one() for one in under_way._streams} == {first, last, *others}


def waits_for(under_way: InFlightCalls) -> bool:
    """Whether nobody else could have the lock now."""
    taken: list[bool] = []
    asker = threading.Thread(target=lambda: taken.append(under_way._lock.acquire(blocking=False)))
    asker.start()
    asker.join()
    return not taken[0]
