"""The GRPO example with a rank killed somewhere in a step: the rewards are those of a run without a fault."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch

import phalanx as px
from tests.examples.loading import loaded
from tests.members.killed_trainers import Operations

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 4


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The script as a module, whose classes are pickled by value."""
    with loaded("grpo", "ray") as module:
        cloudpickle.register_pickle_by_value(module)
        yield module


def count(worker: Any, last: int | None = None) -> None:
    """Count the operations of torch, and die at operation ``last``."""
    worker.__dict__["operations"] = Operations(last).__enter__()


def counted(worker: Any) -> int:
    """Return the number of operations since the last call."""
    operations = worker.__dict__["operations"]
    found, operations.count = operations.count, 0
    return found


def settings_of(example: ModuleType) -> Any:
    return example.Settings(questions=4, group_size=4, steps=STEPS)


def without_a_fault(
    example: ModuleType, groups: Any, sync: px.WeightSync
) -> tuple[list[float], dict[str, list[int]]]:
    """Return the rewards and each rank's number of operations in the second step, and restore both groups."""
    places = {"policy": groups.policy.actor, "rollout": groups.rollout}
    px.snapshot(groups.policy, groups.rollout)
    steps = example.grpo(groups, sync, settings_of(example), torch.Generator().manual_seed(0))
    rewards = [next(steps)]
    for view in places.values():
        view.run(count)
    rewards.append(next(steps))
    operations = {name: view.run(counted) for name, view in places.items()}
    rewards += list(steps)
    px.restore(groups.policy, groups.rollout)
    return rewards, operations


def killed(example: ModuleType, ranks: int, seed: int) -> None:
    choice, settings = random.Random(seed), settings_of(example)
    name, rank, at = choice.choice(["policy", "rollout"]), choice.randrange(ranks), choice.randrange(1, STEPS)
    with example.started(settings, ranks, "cpu", replace=True) as (groups, sync):
        rewards, operations = without_a_fault(example, groups, sync)
        last = choice.randrange(1, operations[name][rank])
        everyone = groups.policy, groups.rollout
        before = [[one.facts.pid for one in group.core.endpoints] for group in everyone]
        steps = example.grpo_with_losses(groups, sync, settings, torch.Generator().manual_seed(0))
        found = [next(steps) for _ in range(at)]
        view = groups.policy.actor if name == "policy" else groups.rollout
        view[rank].run(count, last)

        found += list(steps)

        after = [[one.facts.pid for one in group.core.endpoints] for group in everyone]
    others = [
        (group, index)
        for group in range(2)
        for index in range(ranks)
        if before[group][index] != after[group][index]
    ]
    assert found == rewards
    assert others == [(["policy", "rollout"].index(name), rank)]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (0, *range(2, 20)))]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_rewards_of_a_run_with_a_killed_rank_are_those_of_a_run_without_a_fault(
    ray_cluster: None, example: ModuleType, ranks: int, seed: int
) -> None:
    killed(example, ranks, seed)
