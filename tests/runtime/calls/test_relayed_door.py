"""What a call through relays takes, what comes back, and what is lost with a relay; in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.execution import questions
from phalanx.runtime.groups.ask import ask
from tests.runtime.groups.relayed_door import LocalRelaying, LocalRelays, door_with


class Counter(px.Worker):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @px.register
    def note(self, number: int) -> None:
        self.seen.append(number)

    @px.register
    def noted(self) -> list[int]:
        return self.seen

    @px.register(px.Dispatch.ALL_TO_ALL)
    def own(self, number: int) -> int:
        return number

    @px.register(px.Dispatch.ROWS)
    def first(self, rows: np.ndarray) -> np.ndarray:
        return rows[:1, 0]

    @px.register
    def items(self, count: int) -> Iterator[int]:
        yield from range(count)

    @px.register
    def refuse(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("not this one")


@pytest.fixture
def relaying() -> LocalRelaying:
    return LocalRelaying(None)  # type: ignore[arg-type]  # the group's, once there is one


@pytest.fixture
def group(relaying: LocalRelaying) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([8], use_gpu=False, backend="inline") as pool:
        group = px.WorkerGroup(pool, Counter)
        relaying.transport = group.core.transport
        group.core.door = door_with(group.core.transport, relaying)
        yield group


def relays(relaying: LocalRelaying) -> LocalRelays:
    return relaying.made[-1]


def test_a_call_to_everyone_passes_each_relay_once(group: px.WorkerGroup, relaying: LocalRelaying) -> None:
    group.note(1)

    assert relays(relaying).hops == 6


def test_a_call_to_one_rank_passes_those_above_it(group: px.WorkerGroup, relaying: LocalRelaying) -> None:
    group[3].note(1)

    assert relays(relaying).hops == 2


def test_each_rank_gets_its_own_arguments_and_the_outputs_are_in_order(group: px.WorkerGroup) -> None:
    assert group.own(list(range(10, 18))) == list(range(10, 18))
    assert group[1:7:2].own([1, 2, 3]) == [1, 2, 3]


def test_pieces_for_the_ranks_of_a_node_are_one_object_for_each_relay(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    rows = np.repeat(np.arange(8.0), 20_000).reshape(8, 20_000)  # 160 kB for each rank

    assert list(group.first(rows)) == list(range(8))

    assert relays(relaying).passed == [1] * 6


def test_ranks_that_return_equal_values_give_one_each(group: px.WorkerGroup) -> None:
    first, second, *_ = group.noted()
    first.append(1)

    assert second == []


def test_streams_go_directly_and_calls_after_them_by_relay_again(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    group.note(1)
    assert list(group[2].items.stream(3)) == [0, 1, 2]
    group.note(2)

    assert relays(relaying).hops == 12
    assert group.noted() == [[1, 2]] * 8


def test_relays_keep_nothing_of_calls_that_nobody_holds(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    held = group.note.submit(1)
    group.note(2)
    group.core.door.look()
    group.core.door.look()

    assert len(relays(relaying).kept) == 2
    del held


def test_a_call_takes_along_which_ones_before_it_are_over(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    for _ in range(3):
        group.note(1)

    assert len(relays(relaying).kept) == 2  # the last one, at each head
    assert relays(relaying).forgotten == 0


def test_heads_that_get_no_calls_are_told_what_is_over(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    group.note(1)
    group[0].note(2)
    group.core.door.look()
    group.core.door.look()

    assert not relays(relaying).kept
    assert relays(relaying).forgotten == 2


def test_a_failure_is_that_of_its_rank(group: px.WorkerGroup) -> None:
    with pytest.raises(KeyError, match="rank 5"):
        group.refuse(5)

    assert group.state == "ready"


def test_a_call_through_a_relay_that_is_gone_names_it_and_breaks_the_group(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    group.note(1)
    future = group.own.submit(list(range(8)))
    relays(relaying).lost.add(1)

    with pytest.raises(px.WorkerDiedError, match="relay 1") as raised:
        list(future.stream())

    assert [failure.rank for failure in raised.value.failures] == [4, 5, 6, 7]
    assert group.state == "broken"


def test_relays_are_started_anew_where_one_has_ended_and_nothing_was_lost(
    group: px.WorkerGroup, relaying: LocalRelaying
) -> None:
    group.note(1)
    relays(relaying).lost.add(0)

    group.note(2)

    assert len(relaying.made) == 2
    assert group.noted() == [[1, 2]] * 8


def test_threads_that_ask_at_once_share_the_relays(group: px.WorkerGroup, relaying: LocalRelaying) -> None:
    both, start = threading.Barrier(2), relaying.relays

    def start_slowly(*args: Any) -> LocalRelays:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # a second thread that comes as far as this starts some, too
        return start(*args)

    relaying.relays = start_slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, group.core, "order", range(8), questions.order) for _ in range(2)]
        answers = [one.result().answers(5.0) for one in asked]

    assert answers == [{rank: [] for rank in range(8)}] * 2
    assert len(relaying.made) == 1
