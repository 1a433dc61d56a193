"""In which order many processes are started, and how many at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.backends.waves import AT_ONCE, order_of_start, refill


@given(st.lists(st.integers(0, 5), max_size=40))
def test_every_place_has_its_next_process_before_another_has_one_more(places: list[int]) -> None:
    order = order_of_start(places)
    assert sorted(order) == list(range(len(places)))
    for end in range(len(order)):
        begun = [places[position] for position in order[:end]]
        waiting = {places[position] for position in order[end:]}
        assert all(begun.count(place) + 1 >= begun.count(other) for place in waiting for other in set(begun))


@given(st.integers(0, 3 * AT_ONCE), st.integers(1, 64))
def test_all_are_asked_for_and_never_more_than_so_many_are_under_way(count: int, at_once: int) -> None:
    asked = pending = 0
    while asked < count:
        more = refill(pending, count - asked, at_once)
        asked, pending = asked + more, pending + more
        assert pending <= at_once
        pending -= -(-pending // 4)
    assert asked == count


def test_few_processes_are_one_wave() -> None:
    assert refill(0, AT_ONCE) == AT_ONCE
