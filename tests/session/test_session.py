"""The session: its default backend, clusters that were left, and ``px.shutdown()``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.backends.ray import cluster, private
from phalanx.calls import health_check
from phalanx.session import session as session_module
from phalanx.session.session import Session, session
from phalanx.testing.scripted import ScriptedBackend, scripted
from tests.support.fault_workers import Trouble


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ScriptedBackend, px.WorkerGroup]]:
    """A backend whose cluster was left, and a group on it."""
    with scripted(lambda what, number: "fine") as transport:
        group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False, backend="inline"), Trouble)
        monkeypatch.setattr(transport, "connected", lambda: False)
        yield transport, group


def test_a_cluster_that_was_left_is_not_used_again_and_its_groups_and_pools_are_closed(
    left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, group = left
    for verb in ("kill", "release", "submit", "publish"):
        monkeypatch.setattr(transport, verb, None)
    session.lost(transport)

    assert (group.state, group.pool.closed) == ("closed", True)
    with pytest.raises(px.GroupClosed, match=r"ray\.shutdown\(\).*Connect again with px\.init\(\)"):
        group.ping()
    group.close()
    group.pool.close()


def test_the_health_check_closes_a_group_whose_cluster_was_left(left: Any) -> None:
    _, group = left
    health_check.check(group.core)

    assert group.state == "closed"


def test_leaving_a_cluster_closes_its_channels_and_no_groups_of_other_clusters() -> None:
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, Trouble) as other,
    ):
        with scripted(lambda what, number: "fine") as transport:
            channel = px.Channel(backend="inline")
            group = px.WorkerGroup(px.ResourcePool([1], use_gpu=False, backend="inline"), Trouble)
            group.close()
            session.lost(transport)

        assert other.ping() == [0]
    with pytest.raises(px.GroupClosed, match=r"call it before close\(\)"):
        group.ping()
    with pytest.raises(px.channels.ChannelClosed):
        channel.put(1)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that has started nothing, with Ray as the default backend."""
    monkeypatch.setenv("PHALANX_BACKEND", "ray")
    monkeypatch.setattr(session, "__dict__", Session().__dict__)


def test_the_backend_given_to_init_is_the_default_until_shutdown(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    px.init(backend="inline")
    with px.ResourcePool([1], use_gpu=False) as pool, px.WorkerGroup(pool, Trouble) as group:
        assert (pool.backend, px.put(1).backend, group.ping()) == ("inline", "inline", [0])
    px.init(num_gpus=2)  # the backend of the first call still applies
    px.init(show_ranks="all")  # and the counts of the second
    assert px.ResourcePool([2], use_gpu=True).backend == "inline"
    px.shutdown()
    monkeypatch.setattr(session_module, "settings", lambda: SimpleNamespace(backend="of the environment"))
    with pytest.raises(px.DeclarationError, match="of the environment"):
        px.ResourcePool([1])


def test_inline_pools_use_the_gpus_of_the_machine_unless_num_gpus_is_given(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for cores in (None, 4):
        px.init(backend="inline", num_cpus=cores)
        px.ResourcePool([1], use_gpu=True)
        px.shutdown()
    px.init(backend="inline", num_gpus=0)
    with pytest.raises(px.PlacementError, match="no node has accelerators"):
        px.ResourcePool([1], use_gpu=True)


def test_a_shutdown_does_not_stop_a_cluster_that_the_program_started_later(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, stops = list[Any](), list[int]()
    monkeypatch.setattr(cluster, "is_running", lambda: bool(running))
    monkeypatch.setattr(cluster, "start", running.append)
    monkeypatch.setattr(cluster, "stop", lambda: stops.append(running.clear() or 1))
    px.init(num_cpus=1)
    px.shutdown()
    running.append("the program's own")
    px.init()
    px.shutdown()

    assert (len(stops), running) == (1, ["the program's own"])


def test_a_connection_is_closed_after_ray_was_left_and_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SimpleNamespace(connected=True, node=object())
    monkeypatch.setattr(private, "is_connected", lambda: known.connected)
    monkeypatch.setattr(private, "connection", lambda: known.node)
    made = cluster.Connection()
    before = made.open
    known.node = object()  # Ray was left and joined again

    assert (before, made.open) == (True, False)
    with pytest.raises(px.GroupClosed):
        made.check()
