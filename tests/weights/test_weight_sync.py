"""Syncs of weights from a trainer to a rollout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import phalanx as px
from tests.weights.weight_workers import NAME, Actor, Rollout, same

SLOW_ON_RAY = True

Both = tuple[px.WorkerGroup, px.WorkerGroup]


@pytest.fixture(scope="module")
def both(backend: str) -> Iterator[Both]:
    with px.ResourcePool([3], use_gpu=False) as pool:
        yield px.WorkerGroup(pool[0:1], Actor), px.WorkerGroup(pool[1:3], Rollout)


@pytest.fixture
def sync(both: Both) -> Iterator[px.WeightSync]:
    with px.WeightSync(*both, NAME) as made:
        yield made


def test_a_sync_sends_the_trained_weights_to_every_rank(sync: px.WeightSync, both: Both) -> None:
    actor, rollout = both
    for _ in range(2):
        actor.train()
        version = sync()

        assert version.changed == 4
        assert str(version).startswith(f"version {version.number}: 824 B in ")
        assert str(version).endswith("4 tensors changed")
        assert all(same(one, actor.values()[0]) for one in rollout.values())
        assert rollout.version() == [version.number] * 2
        assert {str(one) for one in px.weights.status(rollout, NAME).values()} == {
            f"complete({version.number})"
        }


def test_a_sync_explains_its_transfers_in_advance_and_cannot_be_used_after_close(
    sync: px.WeightSync, backend: str
) -> None:
    text = str(sync.explain())

    hop, mover = ("same process", "copy") if backend == "inline" else ("same node", "shared memory")
    assert f"by locality: {hop} 824 B" in text
    assert text.count(mover) == 2
    sync.close()
    for use in (sync.explain, sync):
        with pytest.raises(px.DeclarationError, match="was closed"):
            use()


def test_calls_submitted_before_and_after_a_sync_have_the_version_of_their_turn(
    sync: px.WeightSync, both: Both
) -> None:
    actor, rollout = both
    number = sync().number
    before = rollout.version.submit()
    actor.train.submit()
    version = sync.submit()
    after = rollout.version.submit()

    assert [before.result(), after.result()] == [[number] * 2, [number + 1] * 2]
    assert version.result().number == number + 1
