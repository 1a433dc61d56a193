"""Syncs that send only changed elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import phalanx as px
from tests.weights.weight_workers import NAME, Accepter, Publisher, same

SOAK_ON_RAY = True

ROWS = 1 << 16


def masters(_: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(ROWS * 2, dtype=torch.float32).view(ROWS, 2), "b": torch.zeros(7)}


def zeros(rank: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(one).bfloat16() for name, one in masters(rank).items()}


def change(worker: Any, share: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for one in worker.model.values():
        one[torch.rand(one.shape, generator=random) < share] *= -1.5


def values(worker: Any) -> dict[str, torch.Tensor]:
    return {name: one.bfloat16() for name, one in worker.model.items()}


@pytest.fixture
def groups(four: px.ResourcePool) -> tuple[px.WorkerGroup, px.WorkerGroup]:
    return px.WorkerGroup(four[0:2], Publisher.bind(masters)), px.WorkerGroup(four[2:4], Accepter.bind(zeros))


@pytest.fixture
def sync(groups: Any) -> Iterator[px.WeightSync]:
    # Inline, ranks copy from storage to storage, and accept the options of other transports.
    with px.WeightSync(*groups, NAME, delta=True, bucket_bytes=1 << 16, verify="full") as made:
        yield made


def is_synced(trainer: px.WorkerGroup, generator: px.WorkerGroup) -> bool:
    return all(map(same, trainer.run(values), generator.run(values)))


@pytest.mark.slow_on_cluster
def test_deltas_arrive_bit_for_bit_and_explain_names_the_memory_they_need(
    backend: str, groups: Any, sync: px.WeightSync
) -> None:
    trainer, _ = groups
    explained = " ".join(str(sync.explain()).split())
    assert "cast at the source: float32 to bfloat16 (2 tensors)" in explained
    assert ("the sources keep one more copy of what they send" in explained) == (backend == "ray")
    for seed, share in enumerate((0.0, 0.01, 0.5, 1.0)):
        trainer.run(change, share, seed)
        sync()
        assert is_synced(*groups)
    trainer.run(change, 0.1, 5)
    first = sync.submit()  # the next sync does not wait for it
    trainer.run(change, 0.1, 6)
    second = sync.submit()
    assert (first.result().number, second.result().number) == (5, 6)
    assert is_synced(*groups)


@pytest.mark.slow_on_cluster
def test_one_percent_of_changes_sends_at_most_3_5_percent_and_a_target_without_the_last_version_gets_all(
    backend: str, groups: Any, sync: px.WeightSync
) -> None:
    trainer, generator = groups
    everything = sync().wire_bytes
    trainer.run(change, 0.01, 0)
    changed = sync()
    assert changed.nbytes == 2 * (ROWS * 2 + 7) * 2
    # ranks of one process copy: nothing is on the way
    assert changed.wire_bytes <= (0.035 if backend == "ray" else 1) * everything

    px.snapshot(generator)
    with px.WeightSync(trainer, generator, NAME) as other:
        for lose in (other, other.submit, lambda: px.restore(generator), generator.restart):
            trainer.run(change, 0.3, 1)
            lose()
            trainer.run(change, 0.01, 2)
            assert sync().wire_bytes == everything
            assert is_synced(*groups)
