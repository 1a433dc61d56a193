"""Metrics of engines that Ray publishes, read like Prometheus reads them."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import pytest

import phalanx as px
from phalanx.engines import SamplingParams
from tests.engines.counting import CountingEngine
from tests.support.fault_workers import within

LINE = re.compile(r'ray_phalanx_engine_(\w+)\{.*\brank="([^"]*)".*\} (\S+)')
NAMES = {"tokens_per_second", "running", "waiting", "cache_use", "tokens", "weights_version"}


def published(url: str) -> dict[str, dict[str, float]]:
    """Return values by rank and name."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, dict[str, float]] = {}
    for name, rank, value in (match.groups() for match in map(LINE.match, lines) if match):
        found.setdefault(rank, {})[name] = float(value)
    return found


@pytest.mark.slow
def test_ray_publishes_the_metrics_of_each_engine(ray_cluster: None) -> None:
    for module in ("opencensus", "prometheus_client", "opentelemetry.exporter.prometheus"):
        pytest.importorskip(module, reason="Ray publishes metrics where ray[default] is installed")
    import ray

    nodes: Any = ray.nodes()
    url = f"http://{nodes[0]['NodeManagerAddress']}:{nodes[0]['MetricsExportPort']}/metrics"
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, CountingEngine, name="published")
        group.generate([[20], [30], [40], [50]], SamplingParams(max_tokens=8))
        wanted = {f"published rank {rank}" for rank in range(2)}
        assert within(60, lambda: [published(url).get(rank, {}).get("tokens") for rank in wanted] == [16, 16])
        found = published(url)

    assert {rank: set(found[rank]) for rank in wanted} == dict.fromkeys(wanted, NAMES)
