"""Checks of the device paths of this machine: CUDA IPC, NCCL, and device tensors through a call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

import phalanx as px
from phalanx.display.tables import Table

NO_DEVICE = "no CUDA device: torch sees none on this machine, so there is no device path to check"
_SYNCS = 3
_MEGABYTES = 512


class CheckResult(NamedTuple):
    """A checked path: its rate in GB/s, and "ok" or the error."""

    path: str
    devices: str
    rate: float
    result: str


class TensorHolder(px.Worker):
    """A rank with a tensor that a sync sends or receives."""

    def __init__(self, megabytes: int, is_source: bool) -> None:
        self.tensor = torch.arange(megabytes * 250_000, dtype=torch.int32, device=self.device)
        if is_source:
            self.publish_weights("tensor", {"tensor": self.tensor})
        else:
            self.accept_weights("tensor", {"tensor": self.tensor})


def check_devices() -> list[CheckResult]:
    """Check every device path that is possible on this machine. Without a device, return no results."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return []
    px.init(backend="ray", address="local", num_gpus=count)
    with px.ResourcePool([min(count, 2)], use_gpu=True, backend="ray") as pool:
        first, last = pool[:1], pool[-1:]
        results = [check_transport("cuda ipc", first, first)]
        if count > 1:
            results += [check_transport(path, first, last) for path in ("cuda ipc", "nccl")]
    return [*results, check_call("cuda:0")]


def check_transport(
    path: Literal["shared memory", "cuda ipc", "nccl", "gloo"],
    source_pool: px.ResourcePool,
    target_pool: px.ResourcePool,
    megabytes: int = _MEGABYTES,
) -> CheckResult:
    """Sync a tensor from a process to another over a weight transport; report the fastest of some syncs."""
    devices = "one device" if source_pool is target_pool else "two devices"
    try:
        with (
            px.WorkerGroup(source_pool, TensorHolder.bind(megabytes, is_source=True)) as source,
            px.WorkerGroup(target_pool, TensorHolder.bind(megabytes, is_source=False)) as target,
            px.WeightSync(source, target, "tensor", transport=path) as sync,
        ):
            seconds = min(_sync_seconds(source, sync) for _ in range(_SYNCS))
            sent, received = (
                group.run(lambda worker: int(worker.tensor.sum())) for group in (source, target)
            )
            if sent != received:
                raise ValueError("the tensor differs from the source's")
        return CheckResult(path, devices, megabytes / 1e3 / seconds, "ok")
    except Exception as error:  # the table shows it
        return CheckResult(path, devices, 0.0, f"{type(error).__name__}: {error}")


def _sync_seconds(source: px.WorkerGroup, sync: px.WeightSync) -> float:
    source.run(lambda worker: worker.tensor.add_(1).sum().item())
    return sync().seconds


def check_call(device: str, megabytes: int = _MEGABYTES) -> CheckResult:
    """Pass a device tensor through a call of an inline rank, and back."""
    path = "argument and result of a call"
    try:
        tensor = torch.arange(megabytes * 250_000, dtype=torch.int32, device=device)
        with px.ResourcePool([1], use_gpu=False, backend="inline") as pool:
            group = px.WorkerGroup(pool, px.Worker)
            group.run(lambda worker, value: value, tensor)
            began = time.perf_counter()
            (result,) = group.run(lambda worker, value: value, tensor)
            seconds = time.perf_counter() - began
        if not torch.equal(result.to(device), tensor):
            raise ValueError("the result differs from the argument")
        return CheckResult(path, f"{device} to {result.device}", 2 * megabytes / 1e3 / seconds, "ok")
    except Exception as error:  # the table shows it
        return CheckResult(path, device, 0.0, f"{type(error).__name__}: {error}")


def report(results: Sequence[CheckResult]) -> str:
    """Return the results as a table; without a device, a sentence that says so."""
    if not results:
        return NO_DEVICE
    rows = tuple((path, devices, f"{rate:.2f}", result) for path, devices, rate, result in results)
    title = f"device paths, {torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'host memory'}"
    return str(Table(title, ("path", "devices", "GB/s", "result"), rows, ()))
