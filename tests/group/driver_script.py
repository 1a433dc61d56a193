"""A driver of its own process, for tests of how drivers end: prints what it started, then ends as told."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import phalanx as px


def workers() -> type[px.Worker]:
    spec = importlib.util.spec_from_file_location(
        "__main__", Path(__file__).parents[1] / "support" / "fault_workers.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)  # named __main__, so that the class travels by value
    spec.loader.exec_module(module)
    return module.Trouble


def main(address: str, ending: str) -> None:
    px.init(backend="ray", address=address, log_to_driver=False)
    with px.ResourcePool([2], use_gpu=False, name_prefix=f"driver-{os.getpid()}") as pool:
        group = px.WorkerGroup(pool, workers())
        children = [pid for pids in group.leave_children() for pid in pids]
        kept = px.put(bytes(8 * 2**20))
        ranks = group.pid()
        call = group.nap.submit(60.0) if ending == "call" else None
        print(json.dumps({"ranks": ranks, "children": children, "bytes": kept.nbytes}), flush=True)
        if call is not None:
            call.result()
        if ending == "exception":
            raise ValueError("the driver's own mistake")
        if ending == "exit":
            sys.exit(3)
        if ending == "return":
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
