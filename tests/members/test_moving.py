"""``px.ReplacePolicy`` moves ranks off draining nodes at the next call, on a backend with scripted nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from unittest import mock

import pytest

import phalanx as px
from phalanx.backends.backend_types import DrainingNode, Endpoint, Reservation, ReserveRequest, SpawnRequest
from phalanx.group.preemption_notices import look_once
from phalanx.session.session import session
from phalanx.testing import faults
from phalanx.testing.scripted import ScriptedBackend
from phalanx.topology.placement import NodeCapacity
from phalanx.topology.slots import Slot
from tests.members.ledger import Ledger
from tests.support.fault_workers import lose


class Nodes(ScriptedBackend):
    """Block 0 is on node "a", block 1 on "b"; "c" has room for moved ranks."""

    def __init__(self) -> None:
        super().__init__(lambda what, number: "fine")
        self.homes = {0: "a", 1: "b"}
        self.room = 1.0
        self.extras: list[str] = []  # nodes of the resources that were reserved in addition to slots

    def nodes(self) -> list[NodeCapacity]:
        return [
            NodeCapacity(name, name, {"CPU": 1.0, "GPU": 1.0}, {"CPU": free, "GPU": 1.0})
            for name, free in (("a", 0.0), ("c", self.room))
        ]

    def reserve(self, request: ReserveRequest) -> Reservation:
        self.extras += request.on_nodes
        return super().reserve(request)

    def nodes_of(self, slots: Sequence[Slot], reservations: Mapping[str, Reservation]) -> list[str]:
        return [self.homes[slot.block] for slot in slots]

    def repair(self, reservation: Reservation, blocks: Collection[int], timeout: float) -> None:
        going = {node.node_id for node in self.going}
        self.homes.update((block, "c") for block in blocks if self.homes[block] in going)

    def spawn(self, request: SpawnRequest) -> list[Endpoint]:
        made = super().spawn(request)
        nodes = self.nodes_of(request.slots, request.reservations)
        for endpoint, node in zip(made, nodes, strict=True):
            slot = replace(endpoint.facts.slot, node_id=node, host=f"host-{node}")
            endpoint.facts = endpoint.facts._replace(slot=slot)
        return made


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    with mock.patch.dict(session._backends, inline=made):
        yield made


@pytest.fixture
def four(nodes: Nodes) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([2, 2], use_gpu=False, backend="inline") as made:
        yield made


class Stateless(px.Worker):
    independent = True

    @px.register
    def add(self, number: int) -> int:
        return number + self.rank


def drain(group: px.WorkerGroup, *names: str) -> None:
    """Announce that nodes are drained."""
    transport = group.core.backend
    assert isinstance(transport, Nodes)
    transport.going = [DrainingNode(name, 100.0, "preempted") for name in names]
    look_once(group.core)


def test_ranks_move_with_their_state_at_each_notice_and_the_others_keep_their_processes(
    nodes: Nodes, four: px.ResourcePool
) -> None:
    group = px.WorkerGroup(four, Ledger, num_cpus=0.1, on_failure=px.ReplacePolicy(max_failures=0))
    group.add(1)
    before = group.core.endpoints
    drain(group, "b")

    assert group.add(2) == [[1, 2]] * 4

    assert group.core.epoch.nodes == ("a", "a", "c", "c")
    assert nodes.extras == ["a", "a", "b", "b", "c", "c"]
    stayed = [one is other for one, other in zip(before, group.core.endpoints, strict=True)]
    assert stayed == [True, True, False, False]
    assert len(nodes.dead_of(before[2:])) == len(before[2:])
    assert (group.epoch, group.add(3)) == (1, [[1, 2, 3]] * 4)

    drain(group, "a")
    assert group.add(4) == [[1, 2, 3, 4]] * 4
    assert (group.epoch, group.core.epoch.nodes) == (2, ("c", "c", "c", "c"))


class Refusing(Stateless):
    def state_dict(self) -> dict[str, int]:
        raise px.checkpoint.CheckpointError("the tokenizer has nothing to save")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("nothing was saved")


def test_stateless_ranks_move_and_ranks_whose_state_cannot_be_copied_stay(
    four: px.ResourcePool, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = px.WorkerGroup(four, Refusing, on_failure=px.ReplacePolicy(max_failures=0))
    drain(refusing, "a")
    with caplog.at_level(logging.WARNING, "phalanx"):
        assert refusing.add(1) == [1, 2, 3, 4]
    assert refusing.core.epoch.nodes == ("a", "a", "b", "b")
    assert "no snapshot could be taken" in caplog.text

    group = px.WorkerGroup(four, Stateless, on_failure=px.ReplacePolicy(max_failures=0))
    drain(group, "a")
    assert group.add(1) == [1, 2, 3, 4]
    assert group.core.epoch.nodes == ("c", "c", "b", "b")


def test_ranks_stay_with_one_warning_until_another_node_has_room(
    nodes: Nodes, four: px.ResourcePool, caplog: pytest.LogCaptureFixture
) -> None:
    group = px.WorkerGroup(four[1:3], Ledger, num_cpus=0.4, on_failure=px.ReplacePolicy())
    drain(group, "b")

    with caplog.at_level(logging.WARNING, "phalanx"):
        for number, nodes.room in enumerate((0.0, 0.41, 0.81)):  # for no slot, for one, for almost two
            group.add(number)
            nodes.clock.advance(2.0)
    assert (group.epoch, group.core.epoch.nodes) == (0, ("a", "b"))
    assert caplog.text.count("no other node has capacity") == 1

    nodes.room = 0.82  # a block moves as a whole
    assert group.add(3) == [[0, 1, 2, 3]] * 2
    assert (group.epoch, group.core.epoch.nodes) == (1, ("a", "c"))


def test_a_change_moves_the_slots_of_its_group_only_and_needs_no_notice(
    nodes: Nodes, four: px.ResourcePool
) -> None:
    group, other = px.WorkerGroup(four, Stateless), px.WorkerGroup(four[1:], Ledger)
    px.resize(group, 2)
    nodes.going = [DrainingNode("b", 100.0, "preempted")]

    group.restart()
    assert nodes.homes == {0: "a", 1: "b"}
    assert px.replace_ranks(other, 0, state="none") == (0, 1, 2)
    assert nodes.homes == {0: "a", 1: "c"}

    other.close()
    for start in (lambda: px.WorkerGroup(four[2:], Stateless).close(), lambda: px.resize(group, 4)):
        nodes.homes[1] = "b"
        start()
        assert nodes.homes == {0: "a", 1: "c"}


def test_ranks_use_the_accelerators_of_the_node_on_which_the_backend_placed_a_lost_slot(nodes: Nodes) -> None:
    with px.ResourcePool([1], use_gpu=True, backend="inline") as pool:
        group = px.WorkerGroup(pool, Stateless)
        (holding,) = pool.holdings.values()
        nodes.homes[0], holding.reservation.ids[0] = "c", [("7",)]
        group.restart()

        assert "GPU 7" in str(pool.explain())
        assert group.run(lambda worker: os.environ["CUDA_VISIBLE_DEVICES"]) == ["7"]


def test_a_group_with_all_ranks_on_draining_nodes_stays_with_a_warning(
    four: px.ResourcePool, caplog: pytest.LogCaptureFixture
) -> None:
    group = px.WorkerGroup(four, Ledger, on_failure=px.ReplacePolicy())
    with caplog.at_level(logging.WARNING, "phalanx"):
        drain(group, "a", "b")
        group.add(1)

    assert group.epoch == 0
    assert "none could keep their state" in caplog.text


@pytest.mark.parametrize("policy", [None, px.RestartPolicy()])
def test_groups_without_a_replace_policy_do_not_move(
    four: px.ResourcePool, policy: px.RestartPolicy | None
) -> None:
    group = px.WorkerGroup(four, Ledger, on_failure=policy)
    drain(group, "b")

    assert group.add(1) == [[1]] * 4
    assert group.epoch == 0
    assert not group.core.notices.urgent  # calls are as fast as before


@pytest.mark.parametrize(
    ("policy", "state"), [(px.ReplacePolicy(max_failures=0), [1]), (px.RestartPolicy(max_restarts=0), [])]
)
def test_a_rank_that_dies_on_a_draining_node_does_not_count_as_a_failure(
    four: px.ResourcePool, policy: px.ReplacePolicy | px.RestartPolicy, state: list[int]
) -> None:
    group = px.WorkerGroup(four, Ledger, on_failure=policy)
    group.add(1)
    px.snapshot(group)
    faults.kill(group, 2)
    drain(group, "b")
    with pytest.raises(px.PhalanxError):
        group.add(2)

    assert group.add(3) == [[*state, 3]] * 4
    assert group.core.epoch.nodes == ("a", "a", "c", "c")
    lose(group, 0, call=lambda: group.add(4))
    with pytest.raises(px.GroupBroken, match="does not allow another"):
        group.add(5)
