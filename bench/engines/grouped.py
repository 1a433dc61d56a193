"""vLLM in a group, with weights from another group."""

from __future__ import annotations

import time
from typing import Any

import phalanx as px
from bench.engines.setup import OPTIONS, THREADS, TOKENS, model_of, prompts
from bench.protocol import serve
from phalanx.engines import SamplingParams
from phalanx.engines.vllm import VllmRollout


class Source(px.Worker):
    """A rank that publishes the weights."""

    def __init__(self, folder: str) -> None:
        self.model = model_of(folder)
        self.publish_weights("policy", self.model)


class Grouped:
    """A driver connected to Ray."""

    def __init__(self) -> None:
        px.init(num_cpus=4)
        self._pool = px.ResourcePool([2], use_gpu=False)

    def handle(self, op: str, given: dict[str, Any]) -> float:
        """Run an operation and return its seconds."""
        began = time.perf_counter()
        if op == "open":
            self._folder = given["folder"]
            bound = VllmRollout.bind(self._folder, **OPTIONS)
            self._group = px.WorkerGroup(self._pool[0:1], bound, env={"OMP_NUM_THREADS": THREADS})
            self._generate([[1, 2, 3]], 1)
        elif op == "generate":
            self._generate(prompts(), TOKENS)
        elif op == "prepare":
            source = px.WorkerGroup(self._pool[1:2], Source.bind(self._folder))
            self._sync = px.WeightSync(source, self._group, "policy")
            self._sync()
        elif op == "load":
            self._sync()
        elif op == "close":
            self._group.close()
        return time.perf_counter() - began

    def _generate(self, some: list[list[int]], count: int) -> None:
        made = self._group.generate(some, SamplingParams(max_tokens=count, ignore_eos=True))
        if sum(len(one.tokens) for one in made) != count * len(some):
            raise RuntimeError("answers are missing")


if __name__ == "__main__":
    serve(Grouped().handle)
