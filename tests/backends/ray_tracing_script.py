"""Calls a group on a cluster that was started with Ray's own tracing, and prints what they gave.

Ray then hands a hidden argument to every method of an actor.
"""

import os
import sys
from pathlib import Path

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
    """What the cluster calls in each of its processes."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    sys.path.insert(0, os.environ["PYTHONPATH"])
    ray.init(num_cpus=4, include_dashboard=False, _tracing_startup_hook="ray_tracing_script:start_tracing")
    group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False), Ranked)
    print("FOUND", group.whoami(), group.add(1), group.whoami(), group.whoami.submit().result())
    group.close()
