"""``px.Replace(standbys=)``: processes that have imported what ranks need become ranks in place of lost ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.runtime.groups.standbys import Berth, Standbys, _Keeper
from phalanx.testing import faults
from phalanx.transport.values import Endpoint
from tests.runtime.fault_workers import within

SOAK_ON_RAY = True


class Counter(px.Worker):
    """Counts, and knows how it came into being."""

    def __init__(self) -> None:
        self.made_by = "rejoining" if self.rejoining else "start"
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    @px.register
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @px.register
    def tell(self) -> str:
        return self.made_by


@pytest.fixture
def two(backend: str) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([2], use_gpu=False) as made:
        yield made


def standbys_of(group: px.WorkerGroup) -> Standbys:
    found = group._processes.standbys
    assert found is not None
    return found


def berths_of(group: px.WorkerGroup) -> list[Berth]:
    return standbys_of(group)._berths


def all_ready(group: px.WorkerGroup) -> None:
    assert within(60, lambda: all(berth.state == "ready" for berth in berths_of(group)))


def made(pool: px.ResourcePool, standbys: int = 1, **policy: Any) -> px.WorkerGroup:
    group = px.WorkerGroup(pool, Counter, on_failure=px.Replace(max_failures=9, standbys=standbys, **policy))
    all_ready(group)
    return group


def lose(group: px.WorkerGroup, rank: int) -> None:
    faults.kill(group, rank)
    with pytest.raises(px.PhalanxError):
        group.add(1)


@pytest.mark.slow_on_cluster
def test_a_lost_rank_becomes_the_process_that_stood_by(two: px.ResourcePool) -> None:
    group = made(two)
    group.add(3)
    px.snapshot(group)
    (berth,) = berths_of(group)
    assert berth.endpoint is not None
    handle, pid = berth.endpoint.handle, berth.endpoint.facts.pid
    lose(group, 1)

    assert group.add(1) == [4, 4]

    assert group.core.endpoints[1].handle is handle
    assert group.run(lambda _: os.getpid())[1] == pid
    assert group.tell() == ["start", "rejoining"]
    assert group.state == "ready"


def test_it_is_made_again_and_taken_again(two: px.ResourcePool) -> None:
    group = made(two)
    px.snapshot(group)
    for turn in range(3):
        all_ready(group)
        endpoint = berths_of(group)[0].endpoint
        assert endpoint is not None
        lose(group, turn % 2)
        assert group.add(1) == [1, 1]
        assert group.core.endpoints[turn % 2].handle is endpoint.handle


def test_it_is_one_of_the_ranks_where_all_are_replaced(two: px.ResourcePool) -> None:
    group = made(two)
    endpoint = berths_of(group)[0].endpoint
    assert endpoint is not None

    px.replace(group, [0, 1], state="none")

    assert [one.handle is endpoint.handle for one in group.core.endpoints].count(True) == 1
    assert group.tell() == ["rejoining"] * 2


def test_more_ranks_than_standbys_get_new_processes_beside_them(two: px.ResourcePool) -> None:
    group = px.WorkerGroup(two, Counter, on_failure=px.Replace(standbys=1))
    all_ready(group)
    endpoint = berths_of(group)[0].endpoint
    assert endpoint is not None

    px.replace(group, [0], state="none")
    px.replace(group, [1], state="none")  # perhaps before another stands by

    assert group.core.endpoints[0].handle is endpoint.handle
    assert group.tell() == ["rejoining", "rejoining"]


def kill_standby(group: px.WorkerGroup) -> Endpoint:
    """The only one of the group; waits until that is known."""
    before = berths_of(group)[0].endpoint
    assert before is not None
    alive = group.core.transport.alive
    group.core.transport.signal([before], 9)
    assert within(60, lambda: not alive(before))
    return before


@pytest.mark.slow_on_cluster
def test_one_that_dies_is_made_anew_and_then_no_more_are_and_that_is_said(two: px.ResourcePool) -> None:
    group = made(two)
    for lost in (1, 2, 3):
        all_ready(group)
        kill_standby(group)
        standbys_of(group).tend()
        assert within(60, lambda lost=lost: len(standbys_of(group)._lost_at) == lost)  # type: ignore[misc]

    assert "0 of 1 standbys ready, 1 missing (it died)" in str(group.explain())
    px.snapshot(group)
    lose(group, 0)
    assert group.add(1) == [1, 1]  # by a new process


def test_one_that_died_a_moment_ago_is_not_taken(two: px.ResourcePool) -> None:
    group = made(two)
    px.snapshot(group)
    dead = kill_standby(group)
    lose(group, 1)

    assert group.add(1) == [1, 1]
    assert group.core.endpoints[1].handle is not dead.handle


def test_explain_says_where_they_are_and_the_pool_has_their_shares(two: px.ResourcePool) -> None:
    group = made(two, standbys=2)

    text = str(group.explain())
    assert "2 of 2 standbys ready" in text
    assert "a share of slot 0 of block 0" in text
    assert "processes of their own" not in text
    assert [row[-2] for row in two.explain().rows] == ["2 of 10", "2 of 10"]
    assert group.core.life.standbys == "2 of 2 standbys ready"


class Taken:
    """A berth whose process becomes a rank between two looks at it."""

    name, slot, state = "standby 0", "slot 0", "ready"

    def __init__(self, endpoint: Endpoint) -> None:
        self._there = [endpoint]

    @property
    def endpoint(self) -> Endpoint | None:
        return self._there.pop() if self._there else None


def test_one_that_is_taken_while_it_is_told_of_is_told_of() -> None:
    with px.ResourcePool([1], use_gpu=False, backend="inline") as pool:
        group = made(pool)
        standbys, before = standbys_of(group), berths_of(group)
        standbys._berths = [Taken(group.core.endpoints[0])]  # type: ignore[list-item]

        assert "pid" in standbys.notes()[1]

        standbys._berths = before


@pytest.mark.slow_on_cluster
def test_they_end_with_the_group_and_their_shares_are_free(two: px.ResourcePool) -> None:
    group = made(two, standbys=2)
    endpoints = [berth.endpoint for berth in berths_of(group)]

    group.close()

    assert not any(one is not None and group.core.transport.alive(one) for one in endpoints)
    assert two.groups == ()
    standbys_of(group).tend()  # a look that was about to begin
    assert not berths_of(group)


def test_they_stay_where_the_group_is_restarted(two: px.ResourcePool) -> None:
    group = made(two)
    (berth,) = berths_of(group)
    before = berth.endpoint

    group.restart()

    assert berths_of(group) == [berth]
    assert berth.endpoint is before
    assert group.add(1) == [1, 1]


def test_a_pool_without_a_share_for_them_is_said_and_nothing_is_left(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False, max_colocate_count=1) as pool:
        with pytest.raises(px.PlacementError, match=r"standbys=1.*max_colocate_count"):
            px.WorkerGroup(pool, Counter, on_failure=px.Replace(standbys=1))
        assert pool.groups == ()
        px.WorkerGroup(pool, Counter).close()


def test_slots_with_accelerators_pass_them_on(backend: str) -> None:
    with px.ResourcePool([2], use_gpu=True) as pool:
        group = made(pool)
        px.snapshot(group)
        before = [one.facts.slot.accelerator_ids for one in group.core.endpoints]
        masks = group.run(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES"))
        lose(group, 1)

        assert group.add(1) == [1, 1]

        assert [one.facts.slot.accelerator_ids for one in group.core.endpoints] == before
        assert group.run(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES")) == masks


def test_where_the_devices_of_a_slot_cannot_be_told_the_rank_gets_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("no task runs there")

    with px.ResourcePool([2], use_gpu=True, backend="inline") as pool:
        group = made(pool)
        standing = berths_of(group)[0].endpoint
        for holding in pool.holdings.values():
            holding.accelerators.clear()  # as after the slots have moved
        monkeypatch.setattr(pool, "locate", fail)

        px.replace(group, [1], state="none")

        assert group.add(1) == [1, 1]
        assert standing is not None
        assert group.core.endpoints[1].handle is not standing.handle


class Tended:
    """Standbys that are looked after."""

    closed = False

    def __init__(self, looks: list[str], error: Exception | None = None) -> None:
        self._looks, self._error = looks, error

    def tend(self) -> None:
        self._looks.append("look")
        if self._error is not None:
            raise self._error


def test_those_that_cannot_be_looked_after_keep_no_others_from_it() -> None:
    looks: list[str] = []
    kept = [Tended(looks, OSError("gone")), Tended(looks, OSError("gone"))]
    keeper = _Keeper()
    for one in kept:
        keeper._all.add(one)  # type: ignore[arg-type]

    assert keeper._turn() is not None
    assert len(looks) == 2


class Late(px.Worker):
    """Imports in its constructor, and knows whether that was to be done."""

    def __init__(self) -> None:
        self.had = "tabnanny" in sys.modules
        import tabnanny

        self.late = tabnanny

    @px.register
    def tell(self) -> tuple[bool, str]:
        return self.had, os.environ["HUE"]


def test_what_a_rank_has_imported_a_standby_has_imported(ray_cluster: None) -> None:
    with px.ResourcePool([1], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Late, env={"HUE": "7"}, on_failure=px.Replace(standbys=1))
        all_ready(group)
        assert group.tell() == [(False, "7")]

        px.replace(group, [0], state="none")

        assert group.tell() == [(True, "7")]


def test_a_detached_group_has_none() -> None:
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        pytest.raises(px.DeclarationError, match="standbys end with this driver"),
    ):
        px.WorkerGroup(pool, Counter, name="kept", detached=True, on_failure=px.Replace(standbys=1))


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_number_that_makes_no_sense_is_refused(count: Any) -> None:
    with pytest.raises(px.DeclarationError, match=r"px\.Replace\(standbys="):
        px.Replace(standbys=count)
