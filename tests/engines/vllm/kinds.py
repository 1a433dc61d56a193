"""Small engines of each kind."""

from __future__ import annotations

from typing import Any

import phalanx as px
from phalanx.engines.vllm import VllmRollout

SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 32}
"""Options of an engine for tests."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For all ranks: threads that wait for each other are slow on a machine with more ranks than cores."""


KINDS = ("one accelerator", "two accelerators")


def made(folder: str, kind: str, **options: Any) -> tuple[px.ResourcePool, px.WorkerGroup]:
    """Return a pool, which closes its group, and a group with an engine of the kind on logical accelerators."""
    two = kind == "two accelerators"
    pool = px.ResourcePool([1], use_gpu=two, accelerators_per_slot=1 + two)
    bound = VllmRollout.bind(folder, **SMALL, **options)
    return pool, px.WorkerGroup(pool, bound, name="rollout", env=ONE_THREAD)
