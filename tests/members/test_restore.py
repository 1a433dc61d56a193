"""``px.snapshot`` of several groups, and ``px.restore``: all return to one point, whichever group lost a rank."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch

import phalanx as px
from phalanx.testing import faults
from tests.checkpoint.save_workers import Trainer
from tests.support.fault_workers import lose

SOAK_ON_RAY = True


def test_steps_after_a_restore_equal_the_steps_after_the_snapshot_in_the_same_processes(
    two: px.ResourcePool,
) -> None:
    group = px.WorkerGroup(two, Trainer)
    group.step()
    with torch.device("meta"):  # a default device of the user, such as "cuda", does not apply to copies
        px.snapshot(group)
    before, went_on = group.core.epoch, [group.step() for _ in range(3)]

    px.restore(group)
    px.restore(group)

    assert group.core.epoch is before
    assert [group.step() for _ in range(3)] == went_on


@pytest.mark.slow_on_cluster
def test_a_step_of_two_groups_is_repeated_after_one_group_lost_a_rank(two: px.ResourcePool) -> None:
    policy = px.WorkerGroup(two, Trainer, on_failure=px.ReplacePolicy())
    other = px.WorkerGroup(two, Trainer.bind(seed=1))
    px.snapshot(policy, other)
    expected = [other.step() + policy.step() for _ in range(4)]

    losses: list[list[float]] = []
    px.restore(policy, other)
    while len(losses) < 4:
        try:
            drawn = other.step()
            if len(losses) == 2 and policy.epoch == 0:
                faults.kill(policy, 1)
            loss = drawn + policy.step()
            px.snapshot(policy, other)
        except (px.CallError, px.GroupBroken):
            px.restore(policy, other)
            continue
        losses.append(loss)

    assert (losses, policy.epoch, other.epoch) == (expected, 1, 0)


@pytest.mark.slow_on_cluster
def test_a_snapshot_of_several_groups_counts_for_all_groups_or_none(two: px.ResourcePool) -> None:
    group, other = px.WorkerGroup(two, Trainer), px.WorkerGroup(two, Trainer.bind(seed=1))
    first, second = px.snapshot(group, other)
    went_on = group.step()
    faults.kill(other, 0)

    with pytest.raises((px.CallError, px.GroupBroken)):
        px.snapshot(group, other)

    assert (first.number, second.number) == (1, 1)
    px.restore(group)
    assert group.step() == went_on
    assert px.snapshot(group).number == 2


@pytest.mark.parametrize("policy", [px.ReplacePolicy(), None])
def test_a_lost_rank_is_replaced_by_a_restore_with_a_policy_and_never_by_a_snapshot(
    two: px.ResourcePool, policy: px.ReplacePolicy | None
) -> None:
    """A snapshot that replaced the rank would be of an earlier point."""
    group = px.WorkerGroup(two, Trainer, on_failure=policy)
    assert group[1].run(lambda worker: os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "0") is bool(policy)
    px.snapshot(group)
    loss = group.step()
    lose(group, 1, call=lambda: px.snapshot(group))
    with pytest.raises(px.GroupBroken):
        px.snapshot(group)

    if policy is None:
        with pytest.raises(px.GroupBroken):
            px.restore(group)
        px.replace_ranks(group)
    else:
        px.restore(group)

    assert (group.state, group.epoch, group.step()) == ("ready", 1, loss)


@pytest.mark.slow_on_cluster
def test_a_broken_group_without_a_lost_rank_is_restored_with_one_new_process(two: px.ResourcePool) -> None:
    group = px.WorkerGroup(two, Trainer, on_failure=px.ReplacePolicy())
    px.snapshot(group)
    loss = group.step()
    stays, other = group.core.endpoints
    group.core.broken(px.CallCancelled("cut off", group=group.name, method="step"))

    px.restore(group)

    assert group.step() == loss
    assert group.core.endpoints[0] is stays
    assert group.core.endpoints[1] is not other


class Waiter(px.Worker):
    """Runs a call until it is cancelled."""

    def __init__(self) -> None:
        self.counts = {"begun": 0}
        px.register_state(self, counts=self.counts)

    @px.register
    async def wait(self) -> None:
        self.counts["begun"] += 1
        await asyncio.Event().wait()

    @px.register
    async def count(self) -> int:
        return self.counts["begun"]


@pytest.mark.slow
def test_a_restore_cancels_and_undoes_running_calls_of_asynchronous_ranks(ray_cluster: None) -> None:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Waiter, max_concurrency=4)
        px.snapshot(group)
        call = group.wait.submit()
        while group.count() != [1, 1]:
            pass

        px.restore(group)

        with pytest.raises(px.CallCancelled):
            call.result()
        assert (group.count(), group.state, group.epoch) == ([0, 0], "ready", 0)
