"""Check CUDA IPC, NCCL and device tensors through a call on this machine: ``python -m bench.gpu_check``.

It starts a local Ray cluster. Without a device it says so. The exit status is 0 unless a check failed.

After the checks of ``phalanx doctor --gpu`` come syncs between two ranks of each side on one device, in which a target
is killed. NCCL refuses two ranks of a host on one device, so each rank poses as a host (``NCCL_HOSTID``): the rate is
that of the loopback network.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

import torch

import phalanx as px
from phalanx.cli.gpu_check import CheckResult, check_devices, report
from phalanx.testing import faults

_ELEMENTS = 1 << 28
_SYNCS = 3


class Part(px.Worker):
    """A rank with half of the source's tensor, or with a copy of the tensor, on the device."""

    def __init__(self, side: str, elements: int, device: str) -> None:
        os.environ.update(
            CUDA_VISIBLE_DEVICES="0", NCCL_HOSTID=f"{side} {self.rank}", NCCL_SOCKET_IFNAME="lo"
        )
        if side == "target":
            self.tensor = torch.zeros(elements, dtype=torch.int32, device=device)
            self.accept_weights("tensor", {"tensor": self.tensor})
            return
        half = elements // 2
        self.tensor = torch.full((half,), self.rank, dtype=torch.int32, device=device)
        box = px.weights.ShardSpec((elements,), (((half * self.rank,), (half,)),))
        self.publish_weights("tensor", {"tensor": self.tensor}, boxes={"tensor": box})

    @px.register
    def add(self) -> None:
        """Change all elements."""
        self.tensor.add_(1).sum().item()

    @px.register
    def halves(self) -> list[list[int]]:
        """Return the smallest and the largest element of each half."""
        return [[int(half.min()), int(half.max())] for half in self.tensor.chunk(2)]


def check_loss(
    path: Literal["shared memory", "cuda ipc", "nccl"], elements: int = _ELEMENTS, device: str = "cuda:0"
) -> CheckResult:
    """Sync, kill a target during the next sync, and sync again once it was restarted."""
    title = f"{path}, a target is killed"
    try:
        with (
            px.ResourcePool([4], use_gpu=False, backend="ray") as pool,
            px.WorkerGroup(pool[:2], Part.bind("source", elements, device), name="source") as source,
            px.WorkerGroup(pool[2:], Part.bind("target", elements, device), name="target") as target,
            px.WeightSync(source, target, "tensor", transport=path, timeout=60) as sync,
        ):
            rates: list[float] = []
            for _ in range(_SYNCS):
                source.add()
                rates.append(2 * 4 * elements / 1e9 / sync().seconds)
            syncing = sync.submit()
            faults.kill(target, rank=1)
            error = syncing.exception()
            if source.state != "ready":
                raise RuntimeError(f"the source is {source.state} after {type(error).__name__}: {error}")
            target.restart()
            source.add()
            sync()
            expected = [[_SYNCS + 1 + rank] * 2 for rank in (0, 1)]
            if target.halves() != [expected] * 2:
                raise ValueError(f"the targets have {target.halves()}, expected {expected}")
        return CheckResult(title, "one device", max(rates), "ok")
    except Exception as error:  # the table shows it
        return CheckResult(title, "one device", 0.0, f"{type(error).__name__}: {error}")


def main() -> int:
    """Print the table of checks and return the exit status."""
    results = check_devices()
    results += [check_loss(path) for path in ("cuda ipc", "nccl") if results]
    print(report(results))
    return int(any(result.result != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
