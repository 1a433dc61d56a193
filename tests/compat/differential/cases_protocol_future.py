"""Batches behind Ray references; starts a small local cluster."""

from __future__ import annotations

from typing import Any

import ray
import torch
from batches import DataProto, batch, protocol
from plain import attempt, load
from tensordict import TensorDict

INTENDED = {
    "case_futures/uneven pieces": "a future is cut unevenly where rows do not divide; verl fails in the worker",
    "case_futures/piece of a piece": "a piece of a piece is that; verl gives the piece of the whole",
}


def case_futures() -> Any:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        return futures()
    finally:
        ray.shutdown()


def futures() -> Any:
    of = protocol.DataProtoFuture
    refs = [ray.put(piece) for piece in batch(4).chunk(2)]
    whole = of.concat(refs)
    tables = [ray.put(TensorDict({"a": torch.arange(2)}, [2]))] * 2
    put = load("utils.ray_utils").parallel_put
    return {
        "whole": attempt(whole.get),
        "pieces": [attempt(piece.get) for count in (1, 2, 4) for piece in whole.chunk(count)],
        "uneven pieces": [attempt(piece.get) for piece in whole.chunk(3)],
        "piece of a piece": attempt(lambda: whole.chunk(2)[0].chunk(2)[1].get()),
        "tensordicts": attempt(lambda: of.concat(tables).get()),
        "numbers": attempt(lambda: of(sum, [ray.put(1)]).get()),
        "own dispatch": attempt(lambda: of(DataProto.concat, refs, lambda data: data[0:1]).get()),
        "joined references": attempt(lambda: type(protocol.BatchData(refs).concat()).__name__),
        "cut future": attempt(lambda: [type(p).__name__ for p in protocol.BatchData(whole).chunk(2)]),
        "put": attempt(lambda: ray.get(put([1, "x", batch(1)]))),
        "put nothing": attempt(lambda: put([])),
        "put by one": attempt(lambda: ray.get(put([1, 2], max_workers=1))),
        "put by none": attempt(lambda: put([1], max_workers=0)),
    }
