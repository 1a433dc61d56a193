"""A view of a group that is resized elsewhere: refused calls go to ranks of the newest roster."""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Generator, Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.api import view as travel
from phalanx.api.selection import Selection
from phalanx.api.view import GroupView
from phalanx.backends.inline import InlineRank
from phalanx.group import roster
from phalanx.members import resize
from phalanx.session.session import session


class Together(px.Worker):
    """Ranks that make each step together, and count their steps."""

    def __init__(self) -> None:
        self.steps = 0

    @px.register
    def step(self) -> tuple[int, int]:
        self.steps += 1
        return self.rank, self.steps

    @px.register(rerun_on_restart=True)
    def start_from(self, steps: int) -> None:
        self.steps = steps

    @px.register
    def count(self, to: int) -> Iterator[int]:
        yield from range(to)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Independent(Together):
    independent = True

    @px.register(px.Dispatch.ROWS)
    def answers(self, xs: list[int]) -> list[int]:
        self.steps += len(xs)
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
        yield px.WorkerGroup(pool, Independent)


def view_of(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch, *, beside_owner: bool = False
) -> GroupView:
    """Return the group's view in another process, or in its owner that received a view."""
    with monkeypatch.context() as patch:
        patch.setattr(group.core.backend, "immediate", False)
        portable = travel.pack(group.core)
        if not beside_owner:
            patch.setattr(session, "own_group", lambda _: None)
        return GroupView(Selection(travel.unpack(portable)))


@contextlib.contextmanager
def unaware(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Keep views from noticing that processes died."""
    with monkeypatch.context() as patch:
        patch.setattr(roster, "look", lambda _: None)
        yield


@pytest.fixture
def together(here: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(here, Together)


def test_a_view_that_missed_many_changes_calls_current_ranks(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    asked = view[3].step.submit()
    for _ in range(30):
        px.resize(group, 4)
        px.resize(group, 1)

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]
    assert sum(group.run(lambda worker: worker.steps)) == 8
    assert asked.result() == (3, 1), "results of ranks that left stay"
    assert group.core.departed.maxlen, "the roster does not grow with the number of changes"


def test_a_call_on_a_leaving_rank_ends_although_its_view_reads_the_roster_meanwhile(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, wait = view_of(group, monkeypatch), resize._late
    asked = view[3].step.submit()

    def refuse_and_wait(*args: Any) -> list[int]:
        view[3].step()  # refused, so that the view reads the roster, and repeated elsewhere
        return wait(*args)

    monkeypatch.setattr(resize, "_late", refuse_and_wait)
    px.resize(group, 1)

    assert asked.result() == (3, 1)


def test_a_call_of_a_replaced_rank_is_stale_and_a_call_of_a_rank_that_left_is_repeated(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    px.replace_ranks(group, [1], state="none")
    px.resize(group, 3)
    later = view_of(group, monkeypatch)
    px.resize(group, 2)

    with unaware(monkeypatch), pytest.raises(px.errors.StaleEpoch):
        view.answers(list(range(8)))  # the former rank 1 may have begun the call
    with unaware(monkeypatch):
        assert later[2].step()[0] == 0

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]


def test_calls_of_ranks_that_a_restart_ended_are_stale_and_a_close_removes_the_roster(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, core = view_of(group, monkeypatch), group.core
    group.restart()
    px.resize(group, 2)

    with unaware(monkeypatch), pytest.raises(px.errors.StaleEpoch):
        view.answers(list(range(8)))

    assert view.answers(list(range(8))) == [10 * x for x in range(8)]
    assert core.backend.published(core.roster_key) is not None
    group.close()
    assert core.backend.published(core.roster_key) is None


def test_a_restart_does_not_repeat_calls_of_a_view(
    together: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    together.start_from(3)
    view_of(together, monkeypatch).start_from(7)
    together.restart()

    assert together.step() == [(rank, 4) for rank in range(3)]


def test_the_loss_of_a_rank_is_an_error_of_a_view_after_a_resize(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(group, monkeypatch)
    px.resize(group, 3)
    group.core.backend.signal([group.core.endpoints[1]], 9)

    with pytest.raises(px.WorkerDiedError):
        view.answers(list(range(6)))


def test_a_refused_call_of_one_rank_is_repeated_and_a_call_of_all_or_a_stream_is_stale(
    together: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, several, read, all_of_them, streaming = (view_of(together, monkeypatch) for _ in range(5))
    px.replace_ranks(together, 1, state="none")

    with unaware(monkeypatch):
        assert one[0].step() == (0, 1)
        assert px.gather(several[2].step.submit(), several[2].step.submit()) == [(2, 1), (2, 2)]
        assert list(read[0].step.stream()) == [(0, (0, 2))]
        with pytest.raises(px.errors.StaleEpoch):
            all_of_them.step()
        with pytest.raises(px.errors.StaleEpoch):
            list(streaming[0].count.stream(3))

    assert all_of_them.step() == [(0, 3), (1, 1), (2, 3)]
    assert list(streaming[0].count.stream(3)) == [0, 1, 2]


def test_calls_of_a_view_are_stale_while_ranks_are_replaced_and_work_afterwards(
    together: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(together, monkeypatch)
    together.core.backend.kill([together.core.endpoints[1]])  # as px.replace_ranks begins

    with pytest.raises(px.errors.StaleEpoch, match="its owner, in another process"):
        view.step()
    assert together.core.backend.dead_of(together.core.endpoints) == [1]
    px.replace_ranks(together, state="none")
    assert view.step() == [(0, 2), (1, 1), (2, 2)]

    together.close()
    with pytest.raises(px.GroupClosed):
        view.step()


def test_a_view_that_returned_to_its_owner_works_after_a_replacement(
    together: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(together, monkeypatch, beside_owner=True)
    view.step()
    px.replace_ranks(together, 1, state="peer")

    assert view.step() == [(rank, 2) for rank in range(3)]
