"""A group grows and shrinks while it works."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

import phalanx as px
from phalanx.topology.slots import Slot
from tests.support.fault_workers import lose

SOAK_ON_RAY = True


class Answerer(px.Worker):
    """Answers requests; each rank works alone."""

    independent = True

    def __init__(self) -> None:
        self.seed = 0
        self.answered: list[int] = []

    @px.register(rerun_on_restart=True)
    def load(self, seed: int) -> None:
        self.seed += seed  # shows each call

    @px.register
    def answer(self, x: int) -> tuple[int, int]:
        self.answered.append(x)
        return self.rank, 10 * x + self.seed

    @px.register(px.Dispatch.ROWS)
    def answers(self, xs: list[int]) -> list[int]:
        return [10 * x for x in xs]

    @px.register
    def who(self) -> tuple[int, int]:
        assert os.environ["WORLD_SIZE"] == str(self.world_size)
        return self.rank, self.world_size

    @px.register
    def seeds(self) -> int:
        return self.seed


@pytest.mark.slow_on_cluster
def test_remaining_ranks_keep_process_and_number_and_joining_ranks_get_rerun_calls(
    four: px.ResourcePool,
) -> None:
    group = px.WorkerGroup(four, Answerer)
    before = [endpoint.facts.pid for endpoint in group.core.endpoints]

    group.load(2)
    px.resize(group, 2)
    fewer = group.who()
    group.load(7)
    px.resize(group, 3)
    more = group.who()

    assert fewer == [(0, 2), (1, 2)]
    assert more == [(0, 3), (1, 3), (2, 3)]
    assert [endpoint.facts.pid for endpoint in group.core.endpoints][:2] == before[:2]
    assert (len(group), group.world_size, group.ranks) == (3, 3, (0, 1, 2))
    assert group.seeds() == [9, 9, 7]
    px.resize(group, 2)
    group.restart()
    assert group.seeds() == [7, 7]


def test_results_of_ranks_that_left_stay_available_and_calls_of_these_ranks_are_stale(
    four: px.ResourcePool,
) -> None:
    group = px.WorkerGroup(four, Answerer)
    last, futures = group[3], [group[rank].answer.submit(rank) for rank in range(4)]

    px.resize(group, 1)
    with pytest.raises(px.errors.StaleEpoch):
        last.answer(1)
    px.resize(group, 4)

    assert [future.result() for future in futures] == [(rank, 10 * rank) for rank in range(4)]


def test_slots_of_ranks_that_left_are_free_for_other_groups(backend: str) -> None:
    with px.ResourcePool([2], use_gpu=False, max_colocate_count=1) as pool:
        group = px.WorkerGroup(pool, Answerer)
        px.resize(group, 1)
        other = px.WorkerGroup(pool[1:2], Answerer)

        assert other.who() == [(0, 1)]
        with pytest.raises(px.PlacementError, match="does not fit"):
            px.resize(group, 2)
        assert group.who() == [(0, 1)]


def test_ranks_reserve_extra_resources_when_they_join_and_release_them_when_they_leave(backend: str) -> None:
    def held() -> int:
        return len([one for one in pool.backend_api.holders() if "taker-extras" in one.name])

    with px.ResourcePool([3], use_gpu=False) as pool:
        group = px.WorkerGroup(pool, Answerer, name="taker", num_cpus=1)
        for size in (1, 3, 2, 3, 1):
            px.resize(group, size)
            assert (len(group.who()), held()) == (size, size)
        group.close()
        assert held() == 0


@pytest.mark.slow_on_cluster
def test_a_pool_grows_for_a_group_and_shrinks_once_the_added_slots_are_free(backend: str) -> None:
    with px.ResourcePool([1], use_gpu=False) as pool:
        group = px.WorkerGroup(pool, Answerer)
        pool.grow(2)
        before = group.who()
        px.resize(group, 3)
        grown = group.who()
        with pytest.raises(px.PlacementError, match=group.name):
            pool.shrink()
        px.resize(group, 1)
        pool.shrink()

        assert (before, grown) == ([(0, 1)], [(0, 3), (1, 3), (2, 3)])
        assert (pool.world_size, group.who()) == (1, [(0, 1)])


def test_ranks_keep_their_places_in_a_pool_that_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(slots: Sequence[Slot], _: object) -> list[int]:
        return sorted(range(len(slots)), key=lambda index: (slots[index].pool, -slots[index].bundle))

    monkeypatch.setattr("phalanx.pools.pool.order_ranks", turned)
    with px.ResourcePool([1], backend="inline") as pool, px.WorkerGroup(pool, Answerer) as group:
        pool.grow(4)
        for size in (3, 5):
            px.resize(group, size)
            assert group.who() == [(rank, size) for rank in range(size)]


class Model(px.Worker):
    independent = True

    def __init__(self, value: float) -> None:
        import torch  # imported here: the module's other groups start faster without torch

        self.module = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.module.weight, value)
        self.publish_weights("policy", self.module)
        self.accept_weights("served", self.module)

    @px.register
    def value(self) -> float:
        return self.module.weight[0, 0].item()

    @px.register
    def train(self) -> None:
        import torch

        with torch.no_grad():
            self.module.weight += 1.0

    @px.register
    def version(self) -> int | None:
        return px.weights.current_version("served")


@pytest.mark.slow_on_cluster
def test_ranks_that_join_have_the_weights_before_they_are_called(four: px.ResourcePool) -> None:
    trainer = px.WorkerGroup(four[0:1], Model.bind(3.0))
    group = px.WorkerGroup(four, Model.bind(0.0))
    px.resize(group, 1)
    with px.WeightSync(trainer, group, "served", source_name="policy") as sync:
        sync()
        px.resize(group, 3)

        assert group.value() == [3.0] * 3
        assert len(set(group.version())) == 1
        last = px.WeightSync(trainer, group[2:3], "served", source_name="policy")
        px.resize(group, 2)
        trainer.train()
        sync()
        assert group.value() == [4.0] * 2
        with pytest.raises(px.errors.StaleEpoch, match="on ranks that it has"):
            last()


class Asked(Model):
    """Its constructor has another thread try to change the members of a group."""

    group: ClassVar[px.WorkerGroup | None] = None
    free: ClassVar[list[bool]] = []

    def __init__(self, value: float) -> None:
        super().__init__(value)
        if self.group is not None:
            asking = threading.Thread(target=self.ask, args=(self.group,))
            asking.start()
            asking.join()

    def ask(self, group: px.WorkerGroup) -> None:
        self.free.append(group.core.changing.acquire(timeout=1.0))
        if self.free[-1]:
            group.core.changing.release()


def test_a_broken_source_recovers_before_the_members_of_its_target_change(here: px.ResourcePool) -> None:
    """In the other order, a px.restore of both groups, which locks the source first, would deadlock."""
    trainer = px.WorkerGroup(here[0:1], Asked.bind(3.0), on_failure=px.RestartPolicy())
    group = px.WorkerGroup(here, Model.bind(0.0))
    px.resize(group, 1)
    with px.WeightSync(trainer, group, "served", source_name="policy") as sync:
        sync()
        lose(trainer, 0, call=trainer.train)
        Asked.group = group

        px.resize(group, 2)

        assert group.value() == [3.0] * 2
    assert Asked.free == [True]


class Picky(px.Worker):
    independent = True

    def __init__(self) -> None:
        if self.rank == 2:
            raise ValueError("rank 2 does not want to")

        self.count = 0

    @px.register
    def who(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @px.register
    def add(self) -> int:
        self.count += 1
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.slow_on_cluster
def test_a_joining_rank_whose_constructor_raises_leaves_the_group_unchanged(two: px.ResourcePool) -> None:
    group = px.WorkerGroup(two, Picky)
    px.snapshot(group)
    group.add()
    two.grow(1)
    with pytest.raises(ValueError, match="does not want to"):
        px.resize(group, 3)

    assert (group.state, group.who()) == ("ready", [(0, 2), (1, 2)])
    two.shrink()  # nothing is on it
    px.restore(group)
    assert group.add() == [1, 1]


@pytest.mark.slow
def test_a_view_in_another_process_follows_a_resize(ray_cluster: None) -> None:
    def ask(caller: Any, numbers: list[int]) -> list[tuple[int, int]]:
        return [caller.group.any.answer(number) for number in numbers]

    def split(caller: Any, numbers: list[int]) -> tuple[list[int] | str, int]:
        try:
            return caller.group.answers(numbers), len(caller.group)
        except px.errors.StaleEpoch:
            return "stale", len(caller.group)

    with px.ResourcePool([4], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Answerer)
        caller = px.WorkerGroup(pool[0:1], px.Worker)
        px.resize(group, 2)
        caller.run(lambda worker: setattr(worker, "group", group))
        caller.run(ask, [1])

        px.resize(group, 4)
        refused = caller.run(split, list(range(8)))
        grown = caller.run(split, list(range(8)))
        px.resize(group, 1)
        asked = caller.run(ask, list(range(6)))
        shrunk = caller.run(split, list(range(5)))
        answered = sum(group.run(lambda worker: len(worker.answered)), 0)

    assert refused[0][0] == "stale"
    assert grown == [([10 * x for x in range(8)], 4)]
    assert asked == [[(0, 10 * x) for x in range(6)]]
    assert shrunk == [([10 * x for x in range(5)], 1)]
    assert answered == 1 + 6  # the call before the resize ran on a remaining rank
