"""The cluster that a driver joins if it names none."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import ray

from phalanx.backends.ray import cluster, private


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
