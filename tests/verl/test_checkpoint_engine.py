"""verl's registry has the checkpoint engine, and what one process sends by it arrives in another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.conftest import Interpreter
from tests.verl.test_refusals import own_module

PROGRAM = """
import asyncio
import multiprocessing
import sys

import torch

WEIGHTS = [("embed", torch.arange(70000.0).view(700, 100)), ("norm", torch.ones(9, dtype=torch.bfloat16))]


def made(**kwargs):
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

    engine = CheckpointEngineRegistry.new("phalanx", bucket_size=1 << 16, timeout=60.0, **kwargs)
    assert isinstance(engine, CheckpointEngine), type(engine).__mro__
    return engine


async def same(engine):
    found = [pair async for pair in engine.receive_weights(global_steps=1)]
    pairs = zip(found, WEIGHTS, strict=True)
    return all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)


def read(pipe):
    engine = made()
    pipe.send(engine.prepare())
    engine.init_process_group(**pipe.recv())
    pipe.send(asyncio.run(same(engine)))
    engine.finalize()


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    reader = multiprocessing.get_context("fork").Process(target=read, args=(theirs,))
    reader.start()
    engine = made(is_master=True)
    actor, rollout = engine.build_topology(1, 1, [engine.prepare(), ours.recv()])
    engine.init_process_group(**{name: values[0] for name, values in actor.items()})
    ours.send({name: values[0] for name, values in rollout.items()})
    told = asyncio.run(engine.send_weights(iter(WEIGHTS), global_steps=1))
    print(told["sync/tensors"], ours.recv())
    engine.finalize()
    reader.join()
"""


@pytest.mark.parametrize("controller", ["phalanx's", "verl's"])
def test_weights_go_from_one_process_to_another_by_verls_registry(
    interpreter: Interpreter, tmp_path: Path, controller: str
) -> None:
    if controller == "verl's":
        own_module(tmp_path, "program", "import phalanx.compat.verl_weights.registration\n" + PROGRAM)
        ran = interpreter.run("program.py")
    else:
        own_module(tmp_path, "program", PROGRAM)
        ran = interpreter.run("-m", "phalanx", "verl", "program.py")

    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "2 True"
