"""Trainers as Ray actors whose ranks fail on request; prints a report of each as JSON.

Each argument is a failure ("raise", "kill", "stop"), with "lazy " before it for a call that does not block.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)


class Model(Worker):
    """Two ranks, of which the second one fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("dp", self.rank, True)

    def _fail(self, how: str) -> None:
        if self.rank == 0:
            time.sleep(60.0 if how else 0.0)  # as in a collective, whose other end is gone
        elif how == "raise":
            raise ValueError("bad batch")
        elif how in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    @register(Dispatch.ONE_TO_ALL)
    def work(self, how: str) -> int:
        """Returns the rank."""
        print("at work")
        self._fail(how)
        return self.rank

    @register(make_nd_compute_dataproto_dispatch_fn("dp"), blocking=False)
    def later(self, data: Any) -> Any:
        """Returns the rows."""
        self._fail(data.meta_info["how"])
        return data


def seen(group: Any, how: str, lazy: bool) -> dict[str, Any]:
    """Report the end of a failing call."""
    data = DataProto.from_dict({"a": torch.zeros(4)}, meta_info={"how": how})
    began = time.monotonic()
    try:
        group.later(data).get() if lazy else group.work(how)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "text": str(error), "seconds": time.monotonic() - began}
    return {}


@ray.remote(num_cpus=0)
class Trainer:
    """A trainer that is a Ray actor, as verl's own trainers are."""

    def fit(self, how: str, lazy: bool) -> dict[str, Any]:
        """One failing call, after two that end."""
        pool = RayResourcePool([2], use_gpu=False)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Model)), name_prefix="model")
        ranks = ray.get([worker.__ray_call__.remote(lambda self: self.rank) for worker in group.workers])
        assert group.work("") == [0, 1]
        told = {"ranks": ranks, "first": seen(group, how, lazy), "second": seen(group, "", lazy)}
        time.sleep(float(os.environ.get("STAY", "0")))
        return told


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    for words in sys.argv[1:]:
        trainer = Trainer.remote()
        print(
            json.dumps(ray.get(trainer.fit.remote(words.split()[-1], words.startswith("lazy")))), flush=True
        )
