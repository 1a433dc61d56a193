"""Check the device paths of this machine: CUDA IPC, NCCL, and device tensors through a call."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

import phalanx as px
from phalanx.display.tables import Table
from phalanx.weights.buckets import read_slot, write_slot
from phalanx.weights.local_layout import read_tensors
from phalanx.weights.plan import Locality, Locations, RankLocation, make_plan
from phalanx.weights.transport import COPY, CUDA_IPC, NCCL, Deadline, Side
from phalanx.weights.weight_requests import ConnectRequest
from phalanx.weights.weight_routes import make_endpoints

NO_DEVICE = "no CUDA device: torch sees none on this machine, so there is no device path to check"
_TIMEOUT_S = 60.0
_TRANSFERS = 3
_MEGABYTES = 512


class CheckResult(NamedTuple):
    """A checked path: its rate in GB/s, and "ok" or the error."""

    path: str
    devices: str
    rate: float
    result: str


def check_devices(megabytes: int = _MEGABYTES) -> list[CheckResult]:
    """Check every device path that the devices of this machine allow; none without a device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return []
    results = [check_transport(CUDA_IPC, ("cuda:0", "cuda:0"), megabytes), check_call("cuda:0", megabytes)]
    if count > 1:
        results.insert(1, check_transport(CUDA_IPC, ("cuda:0", "cuda:1"), megabytes))
        results.insert(2, check_transport(NCCL, ("cuda:0", "cuda:1"), megabytes))
    return results


def check_transport(transport: str, devices: tuple[str, str], megabytes: int = _MEGABYTES) -> CheckResult:
    """Send a tensor from a process to another over a weight transport, on these devices."""
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipes: list[Connection] = []
    processes: list[Any] = []
    address: object = None
    try:
        for side, device in zip(("source", "target"), devices, strict=True):
            ours, theirs = context.Pipe()
            args = (theirs, transport, side, device, megabytes, f"127.0.0.1:{store.port}", address)
            processes.append(context.Process(target=_run_side, args=args, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
            address = _response(ours)
        for pipe in pipes:
            pipe.send("begin")
        seconds = max(_response(pipe) for pipe in pipes)
        return CheckResult(transport, " to ".join(devices), megabytes / 1e3 / seconds, "ok")
    except Exception as error:  # the table shows it
        return CheckResult(transport, " to ".join(devices), 0.0, f"{type(error).__name__}: {error}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _response(pipe: Connection) -> Any:
    if not pipe.poll(_TIMEOUT_S):
        raise TimeoutError(f"a process did not respond within {_TIMEOUT_S:g} s")
    response = pipe.recv()
    if isinstance(response, Exception):
        raise response
    return response


def _run_side(
    pipe: Connection, transport: str, side: Side, device: str, megabytes: int, store: str, address: object
) -> None:
    """Send or receive, and report the address, and then the seconds of the fastest transfer."""
    try:
        where = torch.device(device)
        if where.type == "cuda":
            torch.cuda.set_device(where)
        filled = torch.arange(megabytes * 250_000, dtype=torch.int32, device=where)
        tensors = {"w": filled if side == "source" else torch.zeros_like(filled)}
        manifest = read_tensors(tensors).manifest
        locations = Locations((RankLocation("node", "source"),), (RankLocation("node", "target"),))
        plan = make_plan([manifest], [manifest], locations)
        transports = {Locality.PROCESS: COPY, Locality.NODE: transport, Locality.REMOTE: transport}
        request = ConnectRequest("gpu-check", side, ("", "w"), (0,), plan, 64 << 20, transports, store=store)
        request = request if address is None else replace(request, addresses={0: address})
        (endpoint,) = make_endpoints(request, 0, where)
        endpoint.connect(Deadline(_TIMEOUT_S))
        pipe.send(endpoint.address)
        pipe.recv()
        seconds: list[float] = []
        for _ in range(_TRANSFERS):
            began, deadline = time.perf_counter(), Deadline(_TIMEOUT_S)
            if side == "source":
                endpoint.send(lambda slot: read_slot(tensors, slot), lambda _: b"sent", deadline)
            else:
                endpoint.receive(lambda slot: write_slot(tensors, slot), deadline)
            seconds.append(time.perf_counter() - began)
        if not torch.equal(tensors["w"], filled):
            raise ValueError("the tensor differs from the source's")
        pipe.send(min(seconds))
        pipe.recv()  # keeps the memory until the other side is done
    except Exception as error:
        pipe.send(error)


def check_call(device: str, megabytes: int = _MEGABYTES) -> CheckResult:
    """Pass a device tensor through a call of an inline rank, and back."""
    path = "argument and result of a call"
    try:
        tensor = torch.arange(megabytes * 250_000, dtype=torch.int32, device=device)
        with px.ResourcePool([1], use_gpu=False, backend="inline") as pool:
            group = px.WorkerGroup(pool, px.Worker)
            group.run(_echo, tensor)
            began = time.perf_counter()
            (result,) = group.run(_echo, tensor)
            seconds = time.perf_counter() - began
        if not torch.equal(result.to(device), tensor):
            raise ValueError("the result differs from the argument")
        return CheckResult(path, f"{device} to {result.device}", 2 * megabytes / 1e3 / seconds, "ok")
    except Exception as error:  # the table shows it
        return CheckResult(path, device, 0.0, f"{type(error).__name__}: {error}")


def _echo(worker: px.Worker, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def report(results: Sequence[CheckResult]) -> str:
    """Return the results as a table; without a device, a sentence that says so."""
    if not results:
        return NO_DEVICE
    rows = tuple((path, devices, f"{rate:.2f}", result) for path, devices, rate, result in results)
    title = f"device paths, {torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'host memory'}"
    return str(Table(title, ("path", "devices", "GB/s", "result"), rows, ()))
