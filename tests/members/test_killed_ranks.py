"""A rank is killed in a step and replaced. The repeated step has the losses of a run without a fault."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import phalanx as px
from tests.members.killed_trainers import Fragile, Replicated, Sharded, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4
CASES = [(Replicated, 2), (Sharded, 2), (Replicated, 4), (Sharded, 4)]


@pytest.fixture(scope="module")
def four(ray_cluster: None) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([4], use_gpu=False, backend="ray") as pool:
        yield pool


def without_a_fault(group: px.WorkerGroup) -> tuple[list[list[float]], list[int]]:
    """Return losses by step and rank, and operations per step by rank; then restore the group."""
    px.snapshot(group)
    outputs = [group.step(number) for number in range(STEPS)]
    px.restore(group)
    return [[loss for loss, _ in one] for one in outputs], [count for _, count in outputs[-1]]


@pytest.mark.parametrize(
    ("kind", "size", "seed"),
    [
        (Sharded, 2, 0),
        *(pytest.param(*case, seed, marks=pytest.mark.soak) for case in CASES for seed in range(20)),
    ],
)
def test_a_step_with_a_killed_rank_is_repeated_with_the_same_losses(
    four: px.ResourcePool, kind: type[Fragile], size: int, seed: int
) -> None:
    pool = four[:size]
    chosen = random.Random(seed)
    rank, at = chosen.randrange(pool.world_size), chosen.randrange(1, STEPS)
    with px.WorkerGroup(pool, kind) as group:
        expected, operations = without_a_fault(group)
        last = chosen.randrange(1, operations[rank])
        before = group.pid()
        found = [losses(group, number) for number in range(at)]
        px.snapshot(group)
        group.arm(rank, last)

        with pytest.raises(px.WorkerDiedError) as raised:
            group.step(at)
        assert raised.value.cause_ranks == (rank,)
        assert px.replace_ranks(group) == (rank,)

        found += [losses(group, number) for number in range(at, STEPS)]
        after = group.pid()
    assert found == expected
    assert [other for other in range(pool.world_size) if after[other] != before[other]] == [rank]
