"""A driver that leaves its cluster with groups open, and joins another, twice: ``leaving_script.py HOW START``.

HOW is "native" or "drop-in" (the groups of verl); START is "px" or "ray", whose ``init`` is called.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

import phalanx as px


class Adder(px.Worker):
    @px.register
    def add(self, x: int) -> int:
        print("adds", x, flush=True)
        return x + self.rank

    @px.register
    def wait(self) -> None:
        threading.Event().wait()


class Native:
    def __init__(self) -> None:
        self.pool = px.ResourcePool([2], use_gpu=False, backend="ray")
        self.group = px.WorkerGroup(self.pool, Adder)
        self.add: Callable[[int], Any] = self.group.add

    def leave_waiting(self) -> None:
        """A call that never ends, and a thread that waits for it."""
        self.waiting = self.group.wait.submit()
        threading.Thread(target=self.waiting.exception, daemon=True).start()


class DropIn:
    def __init__(self) -> None:
        from phalanx.compat.verl.single_controller.base import Worker
        from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
        from phalanx.compat.verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
        )

        class Adder(Worker):
            @register(Dispatch.ONE_TO_ALL)
            def add(self, x: int) -> int:
                print("adds", x, flush=True)
                return x + self.rank

            def wait(self) -> None:
                threading.Event().wait()

        self.pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
        self.group = RayWorkerGroup(self.pool, RayClassWithInitArgs(cls=ray.remote(Adder)))
        self.add: Callable[[int], Any] = self.group.add

    def leave_waiting(self) -> None:
        self.waiting = self.group.execute_all_async("wait")


def play(how: str, start: str) -> object:
    if start == "ray":
        ray.init(address="local", num_cpus=4, include_dashboard=False)
    else:
        px.init(num_cpus=4)
    made = DropIn() if how == "drop-in" else Native()
    assert made.add(1) == [1, 2]
    made.leave_waiting()
    ray.shutdown()
    time.sleep(3)  # what runs in the background has looked several times by then
    assert not ray.is_initialized()
    try:
        made.add(1)
    except px.GroupClosed as error:
        print("closed:", str(error).partition("\n")[0], flush=True)
    assert not ray.is_initialized()
    return made


faulthandler.dump_traceback_later(150, exit=True)
kept = [play(*sys.argv[1:]) for _ in range(2)]  # the groups of before are there when others are made
print("the end", flush=True)
