"""How the engine of a rank is made: alone, or as one of several tp ranks."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import torch

from phalanx.declare.weights import Load
from phalanx.engines.machine import Machine
from phalanx.engines.vllm.library import on_cpu
from phalanx.engines.vllm.machine import (
    VllmMachine,
    capabilities_of,
    engine_arguments,
    make_engine,
    vocabulary_of,
)
from phalanx.engines.vllm.shared_memory import own_names, unlink_shared_memory
from phalanx.engines.vllm.team import Follower, Leader, Team, alone

__all__ = ["Started", "start"]


class Started(NamedTuple):
    """The engine of a rank; ``load`` takes weights of type ``dtype``."""

    machine: Machine
    load: Load
    dtype: torch.dtype


def start(model: str, options: dict[str, Any], *, rank: int, seeds: bool) -> Started:
    """Make the engine of rank ``rank``; those of ``tensor_parallel_size`` ranks in a row are one."""
    arguments = engine_arguments(model, options)
    size = int(options.get("tensor_parallel_size", 1))
    if size == 1:
        if on_cpu():
            alone()
        engine = make_engine({"seed": secrets.randbits(31), **arguments})
        unlink_shared_memory()
        machine = VllmMachine(engine, seeds=seeds)
        return Started(machine, machine.load, engine.vllm_config.model_config.dtype)
    team = Team(rank, size, "gloo" if on_cpu() else "cpu:gloo,cuda:nccl")
    if on_cpu():
        own_names(team.token)
    arguments = {"seed": team.seed, **arguments}  # ranks of one engine draw the same tokens
    engine = make_engine({**arguments, "distributed_executor_backend": "external_launcher"})
    team.meet()
    unlink_shared_memory()
    dtype = engine.vllm_config.model_config.dtype
    if team.rank == 0:
        machine = VllmMachine(Leader(engine, team), seeds=seeds)
        return Started(machine, machine.load, dtype)
    follower = Follower(engine, team, capabilities_of(engine), vocabulary_of(engine))
    return Started(follower, follower.load, dtype)
