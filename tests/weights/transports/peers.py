"""Ranks of two groups as plain processes, told what to do through a pipe."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import TCPStore

from phalanx.weights.buckets import Slot, read_slot, write_slot
from phalanx.weights.plan import Locality
from phalanx.weights.transport_interface import COPY, Deadline, Side
from phalanx.weights.weight_requests import ConnectRequest
from phalanx.weights.weight_routes import make_endpoints
from tests.weights.planning.layouts import Layout, blank, locals_of, manifests, model, one_node, plan_of

SOURCE, TARGET = Layout((1, 1, 2, 1, 1)), Layout((1, 1, 1, 1, 2), tp_dim=1)
"""FSDP of two ranks to tensor parallelism of two: every target reads of every source."""
SHAPES = [[24, 50], [4, 6], [512]]
BUCKET_BYTES = 4096

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.weights.transports.peers"])


def weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The full tensors of a version."""
    return {name: one + version for name, one in model(SHAPES, dtype).items()}


def request(transport: str, connection: str, store: str = "", addresses: Any = None) -> ConnectRequest:
    named = weights(0)
    places = one_node(SOURCE.ranks, TARGET.ranks)
    plan = plan_of(manifests(SOURCE, named), manifests(TARGET, named), places)
    transports = {Locality.PROCESS: COPY, Locality.NODE: transport, Locality.REMOTE: transport}
    return ConnectRequest(
        connection,
        "source",
        ("", "policy"),
        (0, 1),
        plan,
        BUCKET_BYTES,
        transports,
        addresses=addresses or {},
        store=store,
    )


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
            # as a rank does: the sockets of gloo stay open while a frame refers to a transfer
            error.__traceback__ = error.__cause__ = error.__context__ = None
            answer = False, error
            close(state)
        pipe.send(answer)


# What peers are told to do.


def serve_store(state: dict[str, Any]) -> str:
    state["store"] = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return f"127.0.0.1:{state['store'].port}"


def connect(state: dict[str, Any], request: ConnectRequest, side: Side, rank: int) -> Any:
    """Make the end of a rank, and return its address."""
    close(state)
    (state["end"],) = make_endpoints(replace(request, side=side), rank, torch.device("cpu"))
    state["end"].connect(Deadline(30))
    return state["end"].address


def send(state: dict[str, Any], rank: int, version: int, timeout: float, die_at: int | None = None) -> int:
    """Send a version; ``die_at`` is the slot at which this process is killed."""
    tensors = locals_of(SOURCE, weights(version))[rank]
    read = _dying(lambda slot: read_slot(tensors, slot), die_at)
    return state["end"].send(read, lambda target: b"note", Deadline(timeout))


def receive(
    state: dict[str, Any],
    rank: int,
    timeout: float,
    die_at: int | None = None,
    how: int = signal.SIGKILL,
) -> dict[str, torch.Tensor]:
    """Receive a version and return what arrived."""
    tensors = blank(locals_of(TARGET, weights(0)))[rank]
    write = _dying(lambda slot: write_slot(tensors, slot), die_at, how)
    notes = state["end"].receive(write, Deadline(timeout))
    assert set(notes.values()) == {b"note"}
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


def close(state: dict[str, Any]) -> None:
    if (end := state.pop("end", None)) is not None:
        end.close()
