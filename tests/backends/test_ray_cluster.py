"""The cluster that a driver joins if it names none, and the classes of its script."""

from __future__ import annotations

import socket
import sys
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import ray

import phalanx as px
from phalanx.backends.ray import backend, cluster, private


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments of the call of Ray's ``init``, which starts nothing."""
    seen: dict[str, Any] = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(options))
    return seen


def note(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    monkeypatch.setattr(private, "last_address", lambda: address)


@pytest.mark.parametrize("noted", ["127.0.0.1:1", "127.0.0.1:365111", "nothing"])
def test_a_recorded_cluster_that_does_not_answer_is_skipped(
    noted: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    note(monkeypatch, noted)

    cluster.start({})

    assert given["address"] == "local"
    assert noted in caplog.text


def test_ray_joins_a_recorded_cluster_that_answers_and_a_given_address_is_kept(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        note(monkeypatch, f"127.0.0.1:{listener.getsockname()[1]}")
        cluster.start({})
    assert "address" not in given

    note(monkeypatch, "127.0.0.1:1")
    cluster.start({"address": "127.0.0.1:2"})
    assert given["address"] == "127.0.0.1:2"


@pytest.mark.slow
def test_a_class_in_the_script_of_a_spawned_driver_reaches_its_ranks(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ModuleType("__mp_main__")
    exec("import phalanx as px\nclass One(px.Worker):\n    def one(self): return 1\n", vars(script))
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    backend.RayBackend()
    with px.ResourcePool([1], use_gpu=False, backend="ray") as pool:
        assert px.WorkerGroup(pool, script.One).call("one") == [1]
    cloudpickle.unregister_pickle_by_value(script)
