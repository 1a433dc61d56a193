"""The process of one contender: `python -m bench.contender NAME`, driven by `bench.protocol`."""

from __future__ import annotations

import importlib
import sys

from bench.protocol import serve

MODULES = {
    "phalanx": "bench.contenders.phalanx_group",
    "verl": "bench.contenders.verl_group",
    "bare Ray": "bench.contenders.bare_ray",
    "floor": "bench.contenders.floor",
}


def main(name: str) -> None:
    """Serve the named contender until its runner sends quit."""
    serve(importlib.import_module(MODULES[name]).CONTENDER().handle)


if __name__ == "__main__":
    main(sys.argv[1])
