"""``px.snapshot`` and ``px.replace``: a rank is lost, the others stay, and what comes is what would have come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px

SLOW_ON_RAY = True


class Counter(px.Worker):
    """Keeps what it was given; its random numbers are part of what it is."""

    def __init__(self) -> None:
        self.came_later = self.rejoining
        self.rejoined = 0
        self.total = 0.0

    def rejoin(self) -> None:
        super().rejoin()
        self.rejoined += 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "weights": torch.full((3,), self.total)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert bool((state["weights"] == state["total"]).all())
        self.total = state["total"]

    @px.register(px.Dispatch.ALL_TO_ALL)
    def add(self, amount: float) -> float:
        self.total += amount + float(torch.rand(()))
        return self.total

    @px.register(px.Dispatch.ONE_TO_ALL)
    def seed(self) -> None:
        torch.manual_seed(self.rank)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def told(self) -> tuple[int, bool, int]:
        return os.getpid(), self.came_later, self.rejoined


class Stateless:
    @px.register(px.Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class Trainer(px.Worker):
    """Adam on random inputs; gradients are summed over the ranks. ``arm`` says who dies in the next step, and where."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        px.register_state(self, model=self.model, optimizer=self.optimizer)
        self.dies = ""

    @px.register(px.Dispatch.ONE_TO_ALL)
    def step(self) -> float:
        loss = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        self.die("forward")
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            self.die("reduced")
        self.optimizer.step()
        self.die("stepped")
        self.optimizer.zero_grad()
        return float(loss.detach())

    def die(self, where: str) -> None:
        if self.dies == where:
            os.kill(os.getpid(), signal.SIGKILL)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def arm(self, rank: int, where: str) -> int:
        self.dies = where if rank == self.rank else ""
        return os.getpid()


@pytest.fixture
def counters(backend: str) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([3], use_gpu=False) as pool, px.WorkerGroup(pool, Counter) as group:
        yield group


def test_all_ranks_go_back_to_the_snapshot_and_on_from_there(counters: px.WorkerGroup) -> None:
    counters.seed()
    counters.add([1.0, 2.0, 3.0])
    snapshot = px.snapshot(counters)
    went_on = [counters.add([1.0, 1.0, 1.0]) for _ in range(2)]
    before = counters.told()

    assert px.replace(counters, 1) == (1,)

    assert [counters.add([1.0, 1.0, 1.0]) for _ in range(2)] == went_on
    assert snapshot.number == 1
    assert snapshot.nbytes > 0
    after = counters.told()
    assert [came for _, came, _ in after] == [False, True, False]
    assert [count for *_, count in after] == [1, 0, 1]
    assert [after[rank][0] == before[rank][0] for rank in (0, 2)] == [True, True]
    assert (counters.state, counters.epoch) == ("ready", 1)


def test_a_rank_can_be_replaced_again_without_another_snapshot(counters: px.WorkerGroup) -> None:
    counters.add([1.0, 2.0, 3.0])
    px.snapshot(counters)
    went_on = counters.add([1.0, 1.0, 1.0])

    for rank in (0, 1, 2, 1):
        px.replace(counters, rank)
        assert counters.add([1.0, 1.0, 1.0]) == went_on


def test_what_has_not_changed_is_not_sent_again(counters: px.WorkerGroup) -> None:
    first = px.snapshot(counters)
    second = px.snapshot(counters)
    counters.add([1.0, 1.0, 1.0])
    third = px.snapshot(counters)

    assert first.sent_bytes - second.sent_bytes == 3 * 3 * 4  # three ranks' tensors of three floats
    assert third.sent_bytes == first.sent_bytes
    went_on = counters.add([1.0, 1.0, 1.0])
    px.replace(counters, [0])
    assert counters.add([1.0, 1.0, 1.0]) == went_on


def test_a_state_that_nobody_holds_is_named_and_nothing_is_ended(counters: px.WorkerGroup) -> None:
    before = counters.told()
    with pytest.raises(px.GroupBroken, match=r"no snapshot.*state of ranks \[1\]"):
        px.replace(counters, 1)
    snapshot = px.snapshot(counters)
    with pytest.raises(px.GroupBroken, match=r"of rank 0 \(held by rank 1\).*lost"):
        px.replace(counters, [0, snapshot.holders[0]])
    with pytest.raises(px.GroupBroken, match="all 3 ranks"):
        px.replace(counters, [0, 1, 2])

    assert counters.told() == before
    assert counters.epoch == 0


def test_a_replica_gets_the_state_of_a_peer(counters: px.WorkerGroup) -> None:
    counters.execute_all_sync("add", 1.0)
    totals = counters.run(lambda worker: worker.total)
    px.replace(counters, 2, state="peer")
    assert counters.run(lambda worker: worker.total) == [totals[0], totals[1], totals[0]]


def test_nothing_is_replaced_where_nobody_is_lost(counters: px.WorkerGroup) -> None:
    assert px.replace(counters) == ()
    assert counters.epoch == 0


@pytest.mark.parametrize("ranks", [3, -1, "all", [0, None], True])
def test_ranks_that_are_none_are_told(counters: px.WorkerGroup, ranks: Any) -> None:
    with pytest.raises(px.DeclarationError, match="expected ranks from 0 to 2"):
        px.replace(counters, ranks)


def test_views_and_other_things_have_no_snapshot(counters: px.WorkerGroup) -> None:
    for given in (counters[0:2], counters.any, None):
        with pytest.raises(px.DeclarationError, match=r"expected a px\.WorkerGroup"):
            px.snapshot(given)
        with pytest.raises(px.DeclarationError, match=r"expected a px\.WorkerGroup"):
            px.replace(given, 0)


def test_ranks_without_a_state_say_so_and_can_be_replaced_without(backend: str) -> None:
    with px.ResourcePool([2], use_gpu=False) as pool, px.WorkerGroup(pool, Stateless) as group:
        with pytest.raises(px.SaveError, match="has nothing to save"):
            px.snapshot(group)
        before = group.pid()
        px.replace(group, 1, state="none")
        after = group.pid()
        assert after[0] == before[0]
        assert group.epoch == 1


def _losses(pool: px.ResourcePool, rank: int | None, where: str) -> list[list[float]]:
    with px.WorkerGroup(pool, Trainer) as group:
        losses: list[list[float]] = []
        pids: list[int] = group.arm(-1, "")
        for number in range(5):
            if number == 2 and rank is not None:
                pids = group.arm(rank, where)
                with pytest.raises(px.WorkerDiedError) as raised:
                    group.step()
                assert raised.value.cause_ranks == (rank,)
                assert px.replace(group) == (rank,)
            losses.append(group.step())
            px.snapshot(group)
        now = group.arm(-1, "")
        assert [pid for other, pid in enumerate(now) if other != rank] == [
            pid for other, pid in enumerate(pids) if other != rank
        ]
        return losses


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank", "where"), [(2, 0, "forward"), (4, 0, "reduced"), (4, 2, "stepped")])
def test_a_rank_that_is_killed_in_a_step_comes_back_and_all_losses_are_the_same(
    ray_cluster: Any, size: int, rank: int, where: str
) -> None:
    with px.ResourcePool([size], use_gpu=False, backend="ray") as pool:
        assert _losses(pool, rank, where) == _losses(pool, None, "")


@pytest.mark.slow
def test_a_policy_replaces_the_lost_rank_when_the_group_is_next_called(ray_cluster: Any) -> None:
    with px.ResourcePool([3], use_gpu=False, backend="ray") as pool:
        expected = _losses(pool, None, "")
        with px.WorkerGroup(pool, Trainer, on_failure=px.Replace(max_failures=1)) as group:
            before = group.arm(-1, "")
            losses = [group.step()]
            px.snapshot(group)
            group.arm(1, "reduced")
            with pytest.raises(px.WorkerDiedError):
                group.step()
            losses += [group.step() for _ in range(2)]
            assert losses == expected[:3]
            after = group.arm(1, "reduced")
            assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]
            with pytest.raises(px.WorkerDiedError):
                group.step()
            with pytest.raises(px.GroupBroken, match="does not allow another replacement now: 1 were made"):
                group.step()


@pytest.mark.slow
def test_without_a_snapshot_the_policy_restarts_the_group(ray_cluster: Any) -> None:
    with (
        px.ResourcePool([2], use_gpu=False, backend="ray") as pool,
        px.WorkerGroup(pool, Trainer, on_failure=px.Replace()) as group,
    ):
        before = group.arm(0, "forward")
        with pytest.raises(px.WorkerDiedError):
            group.step()
        after = group.arm(-1, "")
        assert not set(before) & set(after)
        assert group.epoch == 1
