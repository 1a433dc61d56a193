"""Ranks of two groups as plain processes, told what to do through a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from phalanx.weights.planning.buckets import Slot, buckets_from, buckets_to
from phalanx.weights.planning.resharding_plan import Plan
from phalanx.weights.planning.resharding_planner import make_plan
from phalanx.weights.planning.tensors import read_slot, write_slot
from phalanx.weights.transports.process_group import GroupSource, GroupTarget, SpanningGroup
from phalanx.weights.transports.ring import RingSource, RingTarget
from phalanx.weights.transports.shared_segment import PlacedSource, PlacedTarget, PlacedTensors
from tests.weights.planning.layouts import Layout, blank, locals_of, manifests, model

SOURCE, TARGET = Layout((1, 1, 2, 1, 1)), Layout((1, 1, 1, 1, 2), tp_dim=1)
"""FSDP of two ranks to tensor parallelism of two: every target reads of every source."""
SHAPES = [[24, 50], [4, 6], [512]]
BUCKET_BYTES = 4096

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.weights.transports.peers"])


def weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The full tensors of a version."""
    return {name: one + version for name, one in model(SHAPES, dtype).items()}


def plan() -> Plan:
    named = weights(0)
    return make_plan(manifests(SOURCE, named), manifests(TARGET, named))


class Peer:
    """A process that runs one function after another, with a state of its own."""

    def __init__(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def result(self, timeout: float = 30.0) -> Any:
        """What the function returned; what it raised is raised."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"no answer within {timeout} s")
        fine, value = self._pipe.recv()
        if not fine:
            raise value
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    state: dict[str, Any] = {}
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(state, *args)
        except Exception as error:
            answer = False, error
        pipe.send(answer)


# What peers are told to do.


def serve_store(state: dict[str, Any]) -> int:
    state["store"] = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return state["store"].port


def ring_source(state: dict[str, Any], rank: int) -> str:
    close(state)
    state["end"] = RingSource(rank, BUCKET_BYTES)
    return state["end"].address


def ring_target(state: dict[str, Any], rank: int, addresses: Sequence[str]) -> None:
    close(state)
    state["end"] = RingTarget(rank, dict(enumerate(addresses)))


def placed_source(state: dict[str, Any], rank: int) -> str:
    close(state)
    state["end"] = PlacedSource(rank)
    return state["end"].address


def placed_target(state: dict[str, Any], rank: int, addresses: Sequence[str]) -> None:
    close(state)
    state["placed"] = PlacedTensors(blank(locals_of(TARGET, weights(0)))[rank])
    state["end"] = PlacedTarget(rank, dict(enumerate(addresses)), state["placed"])
    state["end"].connect(range(len(addresses)), timeout=30.0)


def group_end(state: dict[str, Any], port: int, prefix: str, side: str, rank: int) -> None:
    close(state)
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
    place = {side: rank}
    group = SpanningGroup(store, prefix, sources=range(SOURCE.ranks), targets=range(TARGET.ranks), **place)
    state["end"] = GroupSource(group) if side == "source" else GroupTarget(group, rank)


def send(
    state: dict[str, Any], plan: Plan, rank: int, version: int, timeout: float, die_at: int | None = None
) -> int:
    """Send a version; ``die_at`` is the slot at which this process is killed."""
    tensors = locals_of(SOURCE, weights(version))[rank]
    buckets = buckets_from(plan, rank, BUCKET_BYTES, by_readers=state.get("by_readers", False))
    return state["end"].send(buckets, _dying(lambda slot: read_slot(tensors, slot), die_at), timeout=timeout)


def receive(
    state: dict[str, Any],
    plan: Plan,
    rank: int,
    timeout: float,
    die_at: int | None = None,
    how: int = signal.SIGKILL,
) -> dict[str, torch.Tensor]:
    """Receive a version and give what arrived."""
    tensors = state["placed"].tensors if "placed" in state else blank(locals_of(TARGET, weights(0)))[rank]
    buckets = buckets_to(plan, rank, BUCKET_BYTES, by_readers=state.get("by_readers", False))
    state["end"].receive(
        buckets, _dying(lambda slot: write_slot(tensors, slot), die_at, how), timeout=timeout
    )
    return {name: one.numpy() for name, one in tensors.items()}  # type: ignore[misc]


def _dying(
    view: Callable[[Slot], torch.Tensor], die_at: int | None, how: int = signal.SIGKILL
) -> Callable[[Slot], torch.Tensor]:
    seen = 0

    def viewed(slot: Slot) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen == die_at:
            os.kill(os.getpid(), how)
        return view(slot)

    return viewed


def set_by_readers(state: dict[str, Any]) -> None:
    state["by_readers"] = True


def close(state: dict[str, Any]) -> None:
    for kept in ("end", "placed"):
        if (one := state.pop(kept, None)) is not None:
            one.close()


def placed_values(state: dict[str, Any]) -> dict[str, Any]:
    return {name: one.clone().numpy() for name, one in state["placed"].tensors.items()}


def open_fds(state: dict[str, Any]) -> int:
    return len(os.listdir("/proc/self/fd"))


def at_once(state: dict[str, Any], *work: tuple[str, Callable[..., Any], tuple[Any, ...]]) -> list[Any]:
    """Do several things in threads, each with its own end: (which end, function, arguments)."""
    found: list[Any] = [None] * len(work)

    def one(index: int, key: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            found[index] = function(state[key], *args)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=one, args=(index, *task)) for index, task in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def nested(state: dict[str, Any], key: str, function: Callable[..., Any], *args: Any) -> Any:
    """Do something in a state of its own within this process."""
    return function(state.setdefault(key, {}), *args)
