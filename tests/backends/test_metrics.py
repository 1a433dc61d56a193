"""Counts for monitoring, and their export to Ray's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import phalanx as px
from phalanx.backends.ray.backend import RayBackend
from phalanx.backends.ray.metrics import Exporter
from phalanx.session.session import Counts
from phalanx.tracing.metric_buffer import MetricBuffer
from tests.support.fault_workers import Trouble


class Fake:
    """Stands for the module ``ray.util.metrics``."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, dict[str, str]]] = []

    def Counter(self, name: str, description: str, *, tag_keys: tuple[str, ...], **_: Any) -> Any:
        def note(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(tag_keys)
            assert value > 0
            self.seen.append((name, value, tags))

        return SimpleNamespace(inc=note, observe=note)

    Histogram = Counter


@dataclass
class Watched:
    """Stands for a group."""

    name: str
    counts: Counts


def test_leaving_the_cluster_exports_calls_failures_seconds_and_bytes_once(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fake, counts, backend = MetricBuffer(), Fake(), Counts(), RayBackend()
    source.on = True
    monkeypatch.setattr("phalanx.backends.ray.backend.meters", source)
    monkeypatch.setattr("ray.util.metrics", fake, raising=False)
    backend._exporter = Exporter(source)
    source.watch(group := Watched("g", counts))
    for failed in (False, False, True):
        source.ended("g", "update", 0.5, failed)
    counts.sent_bytes = 100
    backend.leave()
    tags = {"group": "g", "method": "update"}

    calls = [("phalanx_calls_total", 1, tags), ("phalanx_call_seconds", 0.5, tags)]
    assert fake.seen == [
        *calls * 2,
        calls[0],
        ("phalanx_failed_calls_total", 1, tags),
        calls[1],
        ("phalanx_bytes_total", 100, {"group": "g", "kind": "sent"}),
    ]
    fake.seen.clear()
    counts.sent_bytes = 130
    backend.leave()
    assert fake.seen == [("phalanx_bytes_total", 30, {"group": "g", "kind": "sent"})]
    del group
    counts.sent_bytes = 150

    assert source.drain() == ([], [("g", "sent", 20)])
    assert source._groups == []


def test_a_full_buffer_drops_the_oldest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.tracing.metric_buffer._WAITING", 2)
    source = MetricBuffer()
    source.on = True
    for number in range(5):
        source.ended("g", str(number), 0.5, False)

    assert [one.method for one in source.drain()[0]] == ["3", "4"]


def test_calls_of_a_group_on_ray_are_counted_and_ray_accepts_the_metrics(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters = MetricBuffer()  # the process's own are drained by its exporter
    meters.on = True
    for user in ("calls.call", "session.session"):
        monkeypatch.setattr(f"phalanx.{user}.meters", meters)

    with px.ResourcePool([1], use_gpu=False) as pool, px.WorkerGroup(pool, Trouble, name="counted") as group:
        group.ping()
        list(group.ping.stream())
        with pytest.raises(ValueError):
            group.refuse(7)
        ended, moved = meters.drain()
        mine = [one for one in ended if one.group == "counted"]
        methods = [("ping", False), ("ping", False), ("refuse", True)]
        assert [(one.method, one.failed) for one in mine] == methods
        assert all(one.seconds > 0 for one in mine)
        assert {kind for group, kind, _ in moved if group == "counted"} >= {"sent"}

        group.ping()
        meters.ended("counted", "refuse", 0.1, True)
        Exporter(meters).flush()
        assert meters.drain() == ([], [])
