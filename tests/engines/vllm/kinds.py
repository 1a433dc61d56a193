"""Engines of each kind, small."""

from __future__ import annotations

from typing import Any

import phalanx as px
from phalanx.engines.vllm import AsyncVllmRollout, VllmRollout

SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 32}
"""Options of an engine for tests."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For all ranks: threads that wait for each other are slow on a machine with more ranks than cores."""


KINDS = ("own", "own, two ranks", "beside", "beside, two accelerators")


def made(folder: str, kind: str) -> tuple[px.ResourcePool, px.WorkerGroup]:
    """A pool, which closes its group, and a group with an engine of the kind."""
    if kind.startswith("beside"):
        two = kind == "beside, two accelerators"
        pool = px.ResourcePool([1], use_gpu=two, accelerators_per_slot=1 + two)
        bound = AsyncVllmRollout.bind(folder, **SMALL)
    else:
        ranks = 1 + (kind == "own, two ranks")
        pool = px.ResourcePool([ranks], use_gpu=False)
        bound = VllmRollout.bind(folder, tensor_parallel_size=ranks, **SMALL)
    return pool, px.WorkerGroup(pool, bound, name="rollout", env=ONE_THREAD)
