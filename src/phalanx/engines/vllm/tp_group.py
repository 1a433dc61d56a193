"""The ranks of one engine: tp rank 0 decides on every step, the others do what it says.

Each has an ``LLMEngine`` of its own, launched from outside, as vLLM calls it; they have to be given the same requests
in the same order between the same steps. So the leader tells each thing before it does it, and a thread of each
follower does the same. Weights come to the leader only, into a segment that the followers load from too: nothing is
copied for them, and none of them has a part in a sync that could fail by itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.engines.engine_requests import Answer, SampledToken, Vocabulary
from phalanx.engines.engine_types import Capabilities
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.vllm.vllm_weights import reload
from phalanx.engines.vllm.weight_segment import opened
from phalanx.errors import DeclarationError, InternalError, PhalanxError, WeightsError
from phalanx.wire.messages import STORE_VARIABLE

__all__ = ["Follower", "Leader", "Team", "alone"]

_START = timedelta(minutes=10)
_IDLE = timedelta(days=365)
"""A follower waits for what comes next as long as nobody asks for anything."""


def alone() -> None:
    """Let vLLM find the process group of its one rank, so that it opens no port."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Team:
    """Ranks ``first`` to ``first + size - 1`` of a group, which are tp ranks 0 to ``size - 1`` of an engine."""

    def __init__(self, rank: int, size: int, backend: str) -> None:
        self.rank, self.size, self.engine = rank % size, size, rank // size
        if dist.is_initialized():
            raise PhalanxError(
                f"tensor_parallel_size={size}: this process has a process group already, and vLLM needs one of its "
                "own; give the engine processes that it does not share"
            )
        named = os.environ.get(STORE_VARIABLE, "inline")
        if named == "inline":
            raise DeclarationError(
                f'tensor_parallel_size={size} needs a process for each rank: a group with backend="ray"'
            )
        address, _, epoch = named.rpartition("/")
        host, _, port = address.rpartition(":")
        told = dist.TCPStore(host, int(port), None, False, timeout=_START, wait_for_workers=False)
        store = dist.PrefixStore(f"vllm/{epoch}/{self.engine}", told)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=size, timeout=_START)
        self._commands: Any = dist.new_group(backend="gloo", timeout=_IDLE)
        # What vLLM reads: the world is this engine.
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(size))
        told_all: list[Any] = [(f"phalanx-{os.getpid()}-{os.urandom(4).hex()}", secrets.randbits(31))]
        dist.broadcast_object_list(told_all, src=0, group=self._commands)
        self.token: str = told_all[0][0]
        self.seed: int = told_all[0][1]
        nodes = self.gather(_node())
        if len(set(nodes)) > 1:
            raise DeclarationError(
                f"tensor_parallel_size={size}: ranks {rank - self.rank} to {rank - self.rank + size - 1} are one "
                f"engine, and lie on {len(set(nodes))} nodes; give it ranks of one node: blocks of a multiple of "
                f"{size} slots, such as px.ResourcePool([{size}, {size}])"
            )

    def meet(self) -> None:
        """Wait for the others."""
        dist.barrier(group=self._commands)

    def say(self, *command: Any) -> None:
        """Tell the followers."""
        dist.broadcast_object_list([command], src=0, group=self._commands)

    def gather(self, mine: str | None) -> list[str | None]:
        """What each rank has to say; called by all."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self._commands)
        return said

    def hear(self) -> tuple[Any, ...]:
        """What the leader tells next."""
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, src=0, group=self._commands)
        return heard[0]


def _node() -> str:
    """Ranks that have this in common see the same memory and the same numbers of processes."""
    place = "/proc/self/ns/pid"
    return f"{socket.gethostname()}/{os.stat(place).st_ino if os.path.exists(place) else 0}"


class Leader:
    """The engine of tp rank 0: what is asked of it is told to the others. It has the methods that are used here."""

    def __init__(self, engine: Any, team: Team) -> None:
        self._engine, self._team = engine, team
        self._untold: list[tuple[Any, ...]] = []
        self.vllm_config, self.engine_core = engine.vllm_config, engine.engine_core

    def add_request(self, *args: Any) -> None:
        """See vLLM."""
        self._engine.add_request(*args)  # what it refuses nobody hears of
        self._untold.append(("add_request", args))

    def abort_request(self, keys: list[str]) -> None:
        """See vLLM."""
        self._untold.append(("abort_request", (keys,)))
        self._engine.abort_request(keys)

    def step(self) -> Any:
        """See vLLM."""
        self._tell(("step", ()))
        return self._engine.step()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See vLLM."""
        self._tell(("reset_prefix_cache", (reset_running_requests,)))
        return bool(self._engine.reset_prefix_cache(reset_running_requests))

    def load(self, told: str, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights that are in a segment, which the followers find by ``told``; what failed on any of them.

        Raises:
            WeightsError: a follower could not; or what vLLM raises here.
        """
        self._tell(("load", (told,)))
        faults: list[str] = []
        try:
            self._engine.collective_rpc(reload, args=(pairs,))
        finally:
            faults = [f"tp rank {rank}: {why}" for rank, why in enumerate(self._team.gather(None)) if why]
        if faults:
            raise WeightsError("; ".join(faults))

    def sleep(self, **options: Any) -> None:
        """See vLLM."""
        self._tell(("sleep", (options["level"], options["mode"])))
        self._engine.sleep(**options)

    def wake_up(self, tags: list[str]) -> None:
        """See vLLM."""
        self._tell(("wake_up", (tags,)))
        self._engine.wake_up(tags=tags)

    def _tell(self, command: tuple[Any, ...]) -> None:
        untold, self._untold = self._untold, []
        self._team.say(*untold, command)

    def dismiss(self) -> None:
        """The followers do nothing any more."""
        self._tell(("dismiss", ()))


class Follower(ModelRunner):
    """The inside of the engine of another tp rank: calls and weights come to rank 0 only, and this does what that
    says."""

    def __init__(self, engine: Any, team: Team, capabilities: Capabilities, vocabulary: Vocabulary) -> None:
        self._engine, self._team = engine, team
        self.capabilities, self.vocabulary = capabilities, vocabulary
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="phalanx-vllm-follower", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone: its process ended, and the group will
            while not self._ended.is_set():
                for name, args in self._team.hear():
                    self._do(name, args)

    def _do(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "dismiss":
            self._ended.set()
        elif name == "load":
            self._team.gather(self._loaded(*args))
        else:
            getattr(self._engine, name)(*args)

    def _loaded(self, told: str) -> str | None:
        """Load what is in the segment of rank 0; what went wrong."""
        try:
            self._engine.collective_rpc(reload, args=(opened(told),))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def add(self, answers: Sequence[Answer]) -> None:
        """Not called here."""
        raise InternalError("a call came to a tp rank that only follows")

    def step(self) -> Iterable[SampledToken]:
        """Not called here."""
        raise InternalError("a call came to a tp rank that only follows")

    def remove(self, answers: Sequence[Answer]) -> None:
        """Nothing is here."""

    def weights_changed(self) -> None:
        """Rank 0 has seen to it."""

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Told by rank 0; what is given here is not looked at."""
        return [[0.0] * (len(prompt) - 1) for prompt in prompts]

    def close(self) -> None:
        """Leave the engine, once rank 0 has."""
        self._thread.join(5.0)
        self._engine.engine_core.shutdown()
