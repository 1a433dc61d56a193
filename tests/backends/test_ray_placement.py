"""Processes and placement groups on a fake Ray: cleanup after errors, and reports of later attempts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from phalanx.backends.backend_types import ReserveRequest, SpawnRequest
from phalanx.backends.ray import backend, placement_groups, private
from phalanx.backends.ray.cluster import Connection
from phalanx.backends.ray.node_agents import NodeAgents
from phalanx.backends.ray.rank_processes import ProcessHandle
from phalanx.errors import GroupClosed, PlacementError
from phalanx.topology.placement import NodeCapacity
from phalanx.topology.slots import Slot


@pytest.fixture
def ray_backend() -> backend.RayBackend:
    """A backend of a cluster that this process has left."""
    made = backend.RayBackend.__new__(backend.RayBackend)
    made._connection, made._agents = Connection(), NodeAgents()
    made._connection._connection = object()
    return made


def test_processes_that_were_created_before_an_error_are_ended(
    ray_backend: backend.RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[object] = []
    kill = Mock(side_effect=ValueError("this cluster was left"))

    def create(request: SpawnRequest, index: int) -> object:
        if index == 2:
            raise ValueError("the name is taken")
        created.append(object())
        return created[-1]

    monkeypatch.setattr(backend, "_create", create)
    monkeypatch.setattr(private, "kill", kill)
    slots = tuple(Slot(0, index, "pool") for index in range(3))

    with pytest.raises(ValueError, match="the name is taken"):
        ray_backend.spawn(SpawnRequest("Worker", (), slots, {}, {}, lambda services: None, detached=True))

    assert [one.args[0] for one in kill.call_args_list] == created
    assert len(created) == 2


def test_accelerators_are_not_probed_on_a_cluster_that_was_left(
    ray_backend: backend.RayBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_groups, "probe", lambda *_: pytest.fail("this starts a cluster"))
    with pytest.raises(GroupClosed, match="was left"):
        ray_backend.probe([Slot(0, 0, "pool")], {}, {})


def test_a_rank_can_be_watched_while_another_thread_releases_ranks() -> None:
    agents: Any = NodeAgents()
    agents.local = SimpleNamespace(watch=lambda targets: None)
    other = threading.Thread(target=agents.watch, args=[[ProcessHandle(3)]])

    class Watched(set[Any]):
        def __iter__(self) -> Iterator[Any]:
            for count, item in enumerate(super().__iter__()):
                if count == 0:
                    other.start()
                    other.join(0.2)
                yield item

    agents._watched = Watched({("a", 1), ("a", 2)})
    agents.release([])
    other.join(10)

    assert len(agents._watched) == 3


def test_slots_that_fit_on_a_draining_node_only_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "draining_nodes", lambda: {"a": 0})
    monkeypatch.setattr(private, "placement_group_table", dict)
    node = NodeCapacity("a", "a", {"CPU": 4.0}, {"CPU": 4.0})
    monkeypatch.setattr(placement_groups, "nodes", lambda: [node])
    with pytest.raises(PlacementError, match=r"can never be placed(.|\n)*no living node"):
        placement_groups.reserve(ReserveRequest("pool", (1,), {"CPU": 1.0}, timeout=60.0))


WAITING = {"state": "PENDING", "stats": {"scheduling_state": "INFEASIBLE"}}
LEFT = r"pool: px\.shutdown\(\).*in another thread"


@pytest.mark.parametrize(
    ("later", "error"),
    [({"state": "REMOVED"}, LEFT), (RuntimeError("not started yet"), LEFT), (WAITING, "can never be placed")],
)
def test_slots_wait_for_new_nodes_until_they_are_removed_or_refused(
    monkeypatch: pytest.MonkeyPatch, later: Any, error: str
) -> None:
    monkeypatch.setattr(private, "placement_group", lambda *_, **__: Mock(id=b"\n"))
    monkeypatch.setattr(private, "placement_group_table", Mock(side_effect=[WAITING, later, {}]))
    reports = [
        Mock(autoscaler_state_version=1, infeasible_gang_resource_requests=names) for names in ("", "0a")
    ]
    monkeypatch.setattr(private, "autoscaling_state", Mock(side_effect=[reports[0], *reports]))
    monkeypatch.setattr(placement_groups, "_usable", lambda _: [])
    monkeypatch.setattr(placement_groups, "release", lambda keys: None)
    with pytest.raises(PlacementError, match=error):
        placement_groups.reserve(ReserveRequest("pool", (1,), {"CPU": 1.0}, timeout=60.0))
