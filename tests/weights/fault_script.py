"""A driver that syncs weights in a process of its own, tells what it started, and waits."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import phalanx as px


def main(address: str) -> None:
    class Source(px.Worker):
        def __init__(self) -> None:
            self.publish_weights("w", {"w": torch.ones(1 << 20)})

    class Target(px.Worker):
        def __init__(self) -> None:
            self.accept_weights("w", {"w": torch.zeros(1 << 20)})

    px.init(backend="ray", address=address, log_to_driver=False)
    with px.ResourcePool([2], use_gpu=False, name_prefix=f"driver-{os.getpid()}") as pool:
        groups = px.WorkerGroup(pool[0:1], Source), px.WorkerGroup(pool[1:2], Target)
        px.WeightSync(*groups, "w")()
        pids = [pid for group in groups for pid in group.run(lambda _: os.getpid())]
        print(json.dumps(pids), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
