"""A view of a group that is resized elsewhere: what a rank refuses goes to a rank of the newest roster."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.runtime.api.views import GroupView
from phalanx.runtime.groups import travel
from phalanx.runtime.groups.selection import Selection
from phalanx.transport.inline import InlineRank


class Answerer(px.Worker):
    independent = True

    def __init__(self) -> None:
        self.answered = 0

    @px.register
    def answer(self, x: int) -> tuple[int, int]:
        self.answered += 1
        return self.rank, 10 * x

    @px.register(px.Dispatch.ROWS)
    def answers(self, xs: list[int]) -> list[int]:
        self.answered += len(xs)
        return [10 * x for x in xs]


_ranks: dict[int, InlineRank] = {}


def _reduce(rank: InlineRank) -> Any:
    _ranks[id(rank)] = rank
    return rank_of, (id(rank),)


def rank_of(key: int) -> InlineRank:
    return _ranks[key]


@pytest.fixture(autouse=True)
def handles_travel() -> Iterator[None]:
    """Handles of this backend pickle by reference, as those of Ray do."""
    copyreg.pickle(InlineRank, _reduce)
    yield
    copyreg.dispatch_table.pop(InlineRank)
    _ranks.clear()


@pytest.fixture
def group() -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([4], use_gpu=False, backend="inline") as pool:
        yield px.WorkerGroup(pool, Answerer)


def view_of(group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> GroupView:
    """The group as another process sees it."""
    with monkeypatch.context() as patch:
        patch.setattr(group.core.transport, "immediate", False)
        portable = travel.pack(group.core)
    return GroupView(Selection.whole(travel.unpack(portable)))


def answered(group: px.WorkerGroup) -> int:
    return sum(group.run(lambda worker: worker.answered))


def test_a_view_calls_the_ranks_that_have_joined(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    px.resize(group, 2)
    view = view_of(group, monkeypatch)
    px.resize(group, 4)

    first = view.answers(list(range(8)))  # of two pieces, which are refused, and made again
    second = view.answers(list(range(8)))

    assert first == second == [10 * x for x in range(8)]
    assert len(view) == 4
    assert answered(group) == 16


def test_calls_of_ranks_that_left_go_to_others_and_none_runs_twice(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    assert view.answers(list(range(4))) == [0, 10, 20, 30]
    px.resize(group, 1)

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]
    assert [view.any.answer(x) for x in range(3)] == [(0, 0), (0, 10), (0, 20)]
    assert (len(view), answered(group)) == (1, 12)


def test_a_future_of_before_is_answered_once(group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(group, monkeypatch)
    sent = view.answers.submit(list(range(4)))
    px.resize(group, 2)

    assert sent.result() == [0, 10, 20, 30]
    assert view.answers(list(range(4))) == [0, 10, 20, 30]


def test_a_view_that_saw_none_of_many_changes_calls_who_is_there_and_the_roster_does_not_grow(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    sizes: list[int] = []
    for _ in range(30):
        px.resize(group, 4)
        px.resize(group, 1)
        sizes.append(len(group.core.transport.published(group.core.roster_key) or b""))

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]
    assert answered(group) == 8
    assert sizes[-1] == sizes[1]


def test_of_a_replaced_rank_a_call_is_stale_and_of_one_that_left_it_is_made_again(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    px.replace(group, [1], state="none")
    px.resize(group, 3)
    later = view_of(group, monkeypatch)
    px.resize(group, 2)

    with pytest.raises(px.StaleEpoch):
        view.answers(list(range(8)))  # nobody knows what the former rank 1 had begun

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]
    assert later.answers(list(range(6))) == [10 * x for x in range(6)]


def test_of_ranks_that_a_restart_ended_calls_are_stale(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    group.restart()
    px.resize(group, 2)

    with pytest.raises(px.StaleEpoch):
        view.answers(list(range(8)))

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]


def test_the_loss_of_a_rank_is_still_an_error(group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(group, monkeypatch)
    px.resize(group, 3)
    group.core.transport.signal([group.core.endpoints[1]], 9)

    with pytest.raises(px.WorkerDiedError):
        view.answers(list(range(6)))


def test_the_roster_is_taken_back_with_the_group(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view_of(group, monkeypatch)
    px.resize(group, 2)
    key = group.core.roster_key
    there = group.core.transport.published(key) is not None
    group.close()

    assert there
    assert group.core.transport.published(key) is None
