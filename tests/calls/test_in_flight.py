"""The calls of a group that nobody has seen the end of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from phalanx.calls.in_flight import add_stream
from phalanx.group.group import Group
from tests.calls.fake_ranks import group_of


class Stream:
    """A call that streams, and is asked whether it is over."""

    def __init__(self, when_asked: Callable[[], None] = lambda: None) -> None:
        self._when_asked = when_asked

    @property
    def over(self) -> bool:
        self._when_asked()
        return False


def test_streams_that_two_threads_begin_at_once_are_both_known() -> None:
    group = group_of(1)
    others: list[Any] = [Stream()]
    other = threading.Thread(target=add_stream, args=(group, *others))

    def the_other_begins() -> None:
        if other.ident is None:
            other.start()
            while other.is_alive() and not is_held(group):
                pass

    first: Any = Stream(the_other_begins)
    add_stream(group, first)
    last: Any = Stream()
    add_stream(group, last)
    other.join()
    assert {one() for one in group.streams} == {first, last, *others}


def is_held(group: Group) -> bool:
    """Whether nobody else could have the lock now."""
    taken: list[bool] = []
    asker = threading.Thread(target=lambda: taken.append(group.calls_lock.acquire(blocking=False)))
    asker.start()
    asker.join()
    return not taken[0]
