"""``px.snapshot`` and ``px.replace_ranks``: lost ranks get new processes, and all ranks return to one state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.testing import faults
from tests.checkpoint.save_workers import Bag, Nothing, Trainer
from tests.support.fault_workers import lose

SOAK_ON_RAY = True


class Counter(px.Worker):
    """Adds up its arguments, and knows whether it is a replacement."""

    def __init__(self) -> None:
        self.made_by = "rejoining" if self.rejoining else "start"
        self.rejoined = 0
        self.count = torch.zeros(1)
        self.rate = 0

    def rejoin(self) -> None:
        self.rejoined += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    @px.register(rerun_on_restart=True)
    def set_rate(self, rate: int) -> None:
        self.rate = rate

    @px.register
    def add(self, number: int) -> float:
        self.count += number * (self.rank + 1)
        return self.count.item()

    @px.register
    def tell(self) -> tuple[str, int, int]:
        return self.made_by, self.rejoined, self.rate


class Alone(px.Worker):
    """Has a process group of its one rank."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")

    @px.register
    def total(self) -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    def close(self) -> None:
        dist.destroy_process_group()


@pytest.mark.slow_on_cluster
def test_the_step_in_which_a_rank_was_lost_can_be_repeated(three: px.ResourcePool) -> None:
    group = px.WorkerGroup(three, Counter)
    group.set_rate(5)
    group.add(1)
    px.snapshot(group)
    lose(group, 1, call=lambda: group.add(1))

    assert px.replace_ranks(group) == (1,)

    assert group.add(10) == [11.0, 22.0, 33.0]
    assert group.tell() == [("start", 1, 5), ("rejoining", 0, 5), ("start", 1, 5)]
    assert (group.state, group.epoch) == ("ready", 1)


def test_replace_ranks_replaces_named_ranks_and_unreported_dead_ranks(three: px.ResourcePool) -> None:
    group = px.WorkerGroup(three, Counter)
    assert (px.replace_ranks(group), group.epoch) == ((), 0)
    group.add(2)
    px.snapshot(group)

    assert px.replace_ranks(group, 0) == (0,)
    assert group.add(1) == [3.0, 6.0, 9.0]

    px.snapshot(group)
    faults.kill(group, 2)
    assert px.replace_ranks(group) == (2,)
    assert group.add(10) == [13.0, 26.0, 39.0]


def test_a_dead_rank_is_replaced_before_the_backend_reports_it(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = px.WorkerGroup(here, Counter)
    px.snapshot(group)
    faults.kill(group, 1)
    monkeypatch.setattr(group.core.backend, "dead_of", lambda endpoints: [])

    assert px.replace_ranks(group) == (1,)


def test_a_replacement_keeps_the_process_group_of_another_group_in_this_process(
    here: px.ResourcePool,
) -> None:
    with px.WorkerGroup(here[2:], Alone) as other:
        group = px.WorkerGroup(here[:2], Counter)
        px.snapshot(group)
        lose(group, 1, call=lambda: group.add(1))

        px.replace_ranks(group)

        assert other.total() == [1.0]
        assert group.add(1) == [1.0, 2.0]


def test_lost_state_without_a_copy_is_named_and_nothing_changes(three: px.ResourcePool) -> None:
    group = px.WorkerGroup(three, Counter)
    px.snapshot(group)
    lose(group, 0, 1, call=lambda: group.add(1))

    with pytest.raises(px.GroupBroken, match=r"of rank 0 \(held by rank 1\)"):
        px.replace_ranks(group)

    assert group.state == "broken"
    group.restart()  # a snapshot ends with the processes that hold it
    assert group.add(1) == [1.0, 2.0, 3.0]
    with pytest.raises(px.checkpoint.CheckpointError, match=rf"{group.name}.*no snapshot.*restarted"):
        px.restore(group)
    before = group.tell()
    with pytest.raises(px.GroupBroken, match=r"no snapshot.*state of ranks \[1\].*px\.snapshot"):
        px.replace_ranks(group, 1)
    assert group.tell() == before

    assert px.snapshot(group).number == 1
    assert px.replace_ranks(group, 1) == (1,)


@pytest.mark.slow_on_cluster
def test_a_group_closed_during_a_replacement_leaves_no_process(three: px.ResourcePool) -> None:
    group = px.WorkerGroup(three, Counter)
    px.snapshot(group)
    core = group.core
    restored = core.enter

    def close_first(endpoints: Any) -> Any:
        core.enter = restored  # type: ignore[method-assign]
        group.close()
        return restored(endpoints)

    core.enter = close_first  # type: ignore[method-assign]
    with pytest.raises(px.GroupClosed):
        px.replace_ranks(group, 1)

    assert group.state == "closed"
    assert len(core.backend.dead_of(core.endpoints)) == len(core.endpoints)


@pytest.mark.slow_on_cluster
def test_a_replica_gets_the_state_of_a_peer(three: px.ResourcePool) -> None:
    group = px.WorkerGroup(three, Trainer.bind(alike=False))
    group.step()
    lose(group, 1, call=group.step)

    px.replace_ranks(group, state="peer")

    mine, theirs = group.values()[1], group.values()[0]
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert len(set(group.step())) == 3  # each rank draws its own noise


def test_a_replacement_without_state_discards_the_snapshot_and_works_for_stateless_ranks(
    three: px.ResourcePool,
) -> None:
    group, stateless = px.WorkerGroup(three, Counter), px.WorkerGroup(three, Nothing)
    px.snapshot(group)

    px.replace_ranks(group, [1], state="none")
    px.replace_ranks(stateless, [1], state="none")

    with pytest.raises(px.checkpoint.CheckpointError, match="there is no snapshot"):
        px.restore(group)
    with pytest.raises(px.checkpoint.CheckpointError):
        px.snapshot(stateless)
    assert stateless.run(lambda worker: worker.rank) == [0, 1, 2]


def test_unchanged_tensors_are_not_sent_to_their_holder_again(three: px.ResourcePool) -> None:
    group = px.WorkerGroup(three, Bag.bind(still=torch.ones(1 << 16), moving=torch.zeros(4)))
    assert "snapshot" not in str(group.explain())
    first = px.snapshot(group)
    group.run(lambda worker: worker.held["moving"].add_(1))

    second = px.snapshot(group)

    assert str(second) in str(group.explain())
    assert (first.holders, first.nbytes) == ((1, 2, 0), 3 * 4 * ((1 << 16) + 4))
    assert (first.sent_bytes, second.sent_bytes) == (first.nbytes, 3 * 4 * 4)
    px.replace_ranks(group, 1)
    sums = group.run(lambda worker: (worker.held["moving"].sum() + worker.held["still"].sum()).item())
    assert sums == [65540.0] * 3


def test_a_replacement_interrupted_twice_leaves_a_broken_group_and_can_be_repeated(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_too(*_: object) -> None:
        raise KeyboardInterrupt

    group = px.WorkerGroup(here, Counter)
    group.add(1)
    px.snapshot(group)
    with monkeypatch.context() as patch:
        patch.setattr(Counter, "rejoin", interrupted_too)
        patch.setattr("phalanx.members.replacement.settle", interrupted_too)
        with pytest.raises(KeyboardInterrupt):
            px.replace_ranks(group, 1)
    with pytest.raises(px.GroupBroken, match=r"could not be given new ranks: KeyboardInterrupt$"):
        group.add(1)
    px.replace_ranks(group)

    assert group.add(1) == [2.0, 4.0, 6.0]
