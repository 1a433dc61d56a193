"""How the engine of a rank is made: alone, as one of several tp ranks, or beside the rank in processes of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from phalanx.declare.weight_declarations import Load
from phalanx.engines.model_runner import ModelRunner
from phalanx.engines.vllm.async_llm_core import AsyncCore
from phalanx.engines.vllm.async_vllm_runner import AsyncVllmRunner
from phalanx.engines.vllm.extension import EXECUTOR, NAME
from phalanx.engines.vllm.sampling_params import capabilities_of, vocabulary_of
from phalanx.engines.vllm.shared_memory import disown_queues, own_names, unlink_shared_memory
from phalanx.engines.vllm.tp_group import Follower, Leader, Team, alone
from phalanx.engines.vllm.vllm_imports import on_cpu
from phalanx.engines.vllm.vllm_runner import VllmRunner, engine_arguments, make_engine
from phalanx.engines.vllm.weight_segment import KeptWeights

__all__ = ["Started", "StartedBeside", "start", "start_beside"]

Text = Callable[[Sequence[int]], str]
_THREADS = "OMP_NUM_THREADS"


class Started(NamedTuple):
    """The engine of a rank; ``load`` takes weights of type ``dtype``. It is None where another rank takes them."""

    machine: ModelRunner
    load: Load | None
    dtype: torch.dtype


class StartedBeside(NamedTuple):
    """The same, in processes of its own; ``core`` is vLLM's client."""

    machine: ModelRunner
    load: Load
    dtype: torch.dtype
    core: AsyncCore


def start(
    model: str, options: dict[str, Any], *, rank: int, seeds: bool, text: Text | None = None
) -> Started:
    """Make the engine of rank ``rank``; those of ``tensor_parallel_size`` ranks in a row are one.

    ``text`` gives the text of tokens.
    """
    arguments = engine_arguments(model, options)
    size = int(options.get("tensor_parallel_size", 1))
    if size == 1:
        if on_cpu():
            alone()
        engine = make_engine({"seed": secrets.randbits(31), **arguments})
        unlink_shared_memory()
        machine = VllmRunner(engine, *_facts(engine, text), seeds=seeds)
        return Started(machine, machine.load, engine.vllm_config.model_config.dtype)
    team = Team(rank, size, "gloo" if on_cpu() else "cpu:gloo,cuda:nccl")
    if on_cpu():
        own_names(team.token)
    arguments = {"seed": team.seed, **arguments}  # ranks of one engine draw the same tokens
    engine = make_engine({**arguments, "distributed_executor_backend": "external_launcher"})
    team.meet()
    disown_queues()
    team.meet()
    unlink_shared_memory()
    dtype = engine.vllm_config.model_config.dtype
    vocabulary, capabilities = _facts(engine, text)
    if team.rank == 0:
        leader = Leader(engine, team)
        machine = VllmRunner(leader, vocabulary, capabilities, seeds=seeds, kept=KeptWeights())
        return Started(machine, machine.load, dtype)
    return Started(Follower(engine, team, capabilities, vocabulary), None, dtype)


def start_beside(
    model: str,
    options: dict[str, Any],
    *,
    seeds: bool,
    coming: Callable[[], int],
    text: Text | None = None,
) -> StartedBeside:
    """Make an engine in processes of its own; ``coming`` gives the number of the version that is being loaded."""
    size = int(options.get("tensor_parallel_size", 1))
    if on_cpu() and size > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        _share_threads(size)
    arguments = {
        "seed": secrets.randbits(31),
        **engine_arguments(model, options),
        "worker_extension_cls": NAME,
    }
    if size > 1:
        # Said, for inside of Ray vLLM would take actors of its own.
        arguments["distributed_executor_backend"] = EXECUTOR
    core = AsyncCore(arguments)
    facts = _facts(core.llm, text)
    machine = AsyncVllmRunner(core, *facts, seeds=seeds, kept=KeptWeights(), coming=coming)
    return StartedBeside(machine, machine.load, core.llm.vllm_config.model_config.dtype, core)


def _share_threads(processes: int) -> None:
    """The threads of this rank are those of its engine's processes together."""
    told = os.environ.get(_THREADS, "")
    if told.isdigit():
        os.environ[_THREADS] = str(max(1, int(told) // processes))


def _facts(engine: Any, text: Text | None) -> tuple[Any, Any]:
    vocabulary, capabilities = vocabulary_of(engine), capabilities_of(engine)
    return replace(vocabulary, text=text), replace(capabilities, text=text is not None)
