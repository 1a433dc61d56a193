"""A driver that leaves its cluster with groups open, and joins another, twice: ``leaving_script.py START``.

START is "px" or "ray", whose ``init`` is called.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time

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


def play(start: str) -> object:
    if start == "ray":
        ray.init(address="local", num_cpus=4, include_dashboard=False)
    else:
        px.init(num_cpus=4)
    group = px.WorkerGroup(px.ResourcePool([2], use_gpu=False, backend="ray"), Adder)
    assert group.add(1) == [1, 2]
    waiting = group.wait.submit()  # never ends, and a thread waits for it
    threading.Thread(target=waiting.exception, daemon=True).start()
    ray.shutdown()
    time.sleep(3)  # what runs in the background has looked several times by then
    assert not ray.is_initialized()
    try:
        group.add(1)
    except px.GroupClosed as error:
        print("closed:", str(error).partition("\n")[0], flush=True)
    assert not ray.is_initialized()
    return group, waiting


faulthandler.dump_traceback_later(150, exit=True)
kept = [play(*sys.argv[1:]) for _ in range(2)]  # the groups of before are there when others are made
print("the end", flush=True)
