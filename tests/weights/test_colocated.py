"""Source and target as roles of one group: one call per rank serves both, and they can share storage."""

from __future__ import annotations

import threading
import weakref
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.weights.weight_handlers import _sync_both
from tests.weights.weight_workers import NAME, Accepter, Actor, Publisher, groups, halves, network, told

SLOW_ON_RAY = True

FULL = torch.arange(48, dtype=torch.float32).reshape(6, 8)


def column_boxes(rank: int) -> dict[str, px.weights.ShardSpec]:
    return {"w": px.weights.ShardSpec((6, 8), (((0, 4 * rank), (6, 4)),))}


ROWS = halves({"w": FULL}, step=told(lambda: 3))
COLUMNS = Accepter.bind(lambda _: {"w": torch.zeros(6, 4)}, boxes=column_boxes)


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:2], px.colocate({"actor": ROWS, "rollout": COLUMNS}))


def test_boxes_are_copied_within_a_rank_and_sent_by_shared_memory_to_the_other_rank(
    group: px.WorkerGroup, backend: str
) -> None:
    place, other = ("same process", "copy") if backend == "inline" else ("same node", "shared memory")
    own, others = ("same process", "copy", "48 B"), (place, other, "48 B")
    with px.WeightSync(group.actor, group.rollout, NAME, verify="full") as sync:
        for number in (1, 2, 3):
            group.actor.run(lambda worker: worker.model["w"].add_(1))
            version = sync()

            assert version.changed == 1
            parts = group.rollout.run(lambda worker: worker.model["w"])
            assert torch.equal(torch.cat(parts, 1), FULL + number)
            assert version.nbytes == 4 * 3 * 4 * 4
            assert [row[2:] for row in sync.explain().rows] == [own, others, others, own]


def test_the_error_of_a_refusing_source_role_is_raised_and_the_next_sync_works(group: px.WorkerGroup) -> None:
    with px.WeightSync(group.actor, group.rollout, NAME, timeout=5.0) as sync:
        with pytest.raises(px.weights.WeightsError, match="the source is at step 3, expected step 4"):
            sync(step=4)

        assert sync(step=3).step == 3


class Sharer(px.Worker):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = network(1).to(dtype)
        self.accept_weights(NAME, self.model, share=True)

    @px.register
    def weight(self) -> tuple[torch.Tensor, int | None]:
        return self.model.get_parameter("0.weight").detach(), px.weights.current_version(NAME, self)


def where(role: px.WorkerGroup) -> list[int]:
    return role.run(lambda worker: worker.model[0].weight.data_ptr())


def test_shared_weights_use_the_storage_of_the_source_and_send_nothing_also_after_a_restart() -> None:
    with groups(px.colocate({"actor": Actor, "rollout": Sharer}), sizes=(2,)) as (group,):
        sync = px.WeightSync(group.actor, group.rollout, NAME)
        version = sync()
        assert where(group.actor) == where(group.rollout)

        group.actor.train()
        found = group.rollout.weight()
        assert all(torch.equal(one[0], network(0).get_parameter("0.weight") + 1) for one in found)
        assert [one[1] for one in found] == [version.number] * 2
        assert version.nbytes == 0
        assert sync().number == 2
        assert sync().changed == 0

        def moved(worker: Any) -> None:
            for parameter in worker.model.parameters():
                parameter.data = parameter.data.clone()  # as if offloaded to the CPU and back

        group.actor.run(moved)
        assert where(group.actor) != where(group.rollout)
        group.actor.train()
        sync()
        assert where(group.actor) == where(group.rollout)

        group.restart()
        with pytest.raises(px.weights.WeightsTorn):
            group.rollout.weight()
        sync()
        assert where(group.actor) == where(group.rollout)


def test_sharing_weights_frees_the_former_storage_of_the_target() -> None:
    def move(worker: Any) -> None:
        array = np.zeros((10, 6), np.float32)
        worker.former = weakref.ref(array)
        worker.model.get_parameter("0.weight").data = torch.from_numpy(array)

    with groups(px.colocate({"actor": Actor, "rollout": Sharer})) as (group,):
        group.rollout.run(move)
        px.WeightSync(group.actor, group.rollout, NAME)()
        assert group.rollout.run(lambda worker: worker.former() is None) == [True]


def test_the_error_of_a_target_is_not_replaced_by_the_error_of_its_closed_source() -> None:
    closed = threading.Event()

    def send(_: object) -> None:
        closed.wait(20)
        raise KeyError("no connection")

    source = Mock(send=send, close=closed.set)
    target = Mock(receive=Mock(side_effect=px.weights.WeightsVerificationError("these differ")))
    with pytest.raises(px.weights.WeightsVerificationError, match="these differ"):
        _sync_both(source, target, Mock())


def test_storage_cannot_be_shared_with_another_process_type_or_layout() -> None:
    def tensors(_: int) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(3)}

    accepting = Accepter.bind(tensors, share=told(True))
    apart = groups(Publisher.bind(tensors), accepting, sizes=(1, 2))
    with apart as both, pytest.raises(px.DeclarationError, match=r"share=True\) is for roles of one process"):
        px.WeightSync(*both, NAME)()

    columns = Accepter.bind(lambda _: {"w": torch.zeros(6, 4)}, boxes=column_boxes, share=told(True))
    for actor, rollout in ((Actor, Sharer.bind(torch.bfloat16)), (ROWS, columns)):
        unlike = groups(px.colocate({"actor": actor, "rollout": rollout}), sizes=(2,))
        with unlike as (group,), pytest.raises(px.DeclarationError, match="the source's layout and types"):
            px.WeightSync(group.actor, group.rollout, NAME)()
