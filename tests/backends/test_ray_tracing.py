"""A cluster whose own tracing is on: Ray then hands a hidden argument to every method of an actor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import phalanx as px


class Ranked(px.Worker):
    @px.register(px.Dispatch.ONE_TO_ALL)
    def whoami(self) -> int:
        return self.rank

    @px.register(px.Dispatch.ONE_TO_ALL)
    def add(self, number: int) -> int:
        return self.rank + number


def start_tracing() -> None:
    """Set a tracer provider: the cluster calls this function in each of its processes."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())


@pytest.mark.slow
def test_calls_with_and_without_arguments_work_while_ray_traces_them() -> None:
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=170, check=False
    )
    assert "FOUND [0, 1] [1, 2] [0, 1] [0, 1]" in done.stdout, done.stderr[-4000:]


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    hook = "test_ray_tracing:start_tracing"
    ray.init(address="local", num_cpus=4, include_dashboard=False, _tracing_startup_hook=hook)
    group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False), Ranked)
    print("FOUND", group.whoami(), group.add(1), group.whoami(), group.whoami.submit().result())
    group.close()
