"""Tokens per second, updates and starts of vLLM, alone and through a group, in turns."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.engines.setup import LARGE, REQUESTS, SMALL, THREADS, TOKENS
from bench.environment import ROOT, contender_env, vllm_python
from bench.protocol import Peer
from bench.stats import Case, Goal, Sample

SCENARIO = "engine"
GROUPED, ALONE = "phalanx", "vLLM alone"
STARTS, TURNS = 3, 7
_MODULES = {GROUPED: "bench.engines.grouped", ALONE: "bench.engines.alone"}

START = Case(SCENARIO, 1, variant="start to first token")
TOKENS_OF = Case(SCENARIO, 1, variant=f"{REQUESTS} requests of {TOKENS} tokens")
UPDATE = Case(SCENARIO, 1, megabytes=520, variant="an update, bf16")


def goals() -> dict[Case, tuple[Goal, ...]]:
    """Return the bounds: 5 % fewer tokens per second, an update 30 % longer, a start 10 % longer."""
    return {
        START: (Goal(ALONE, 1.1),),
        TOKENS_OF: (Goal(ALONE, 1 / 0.95),),
        UPDATE: (Goal(ALONE, 1.3),),
    }


def measure(say: Callable[[str], None], starts: int = STARTS, turns: int = TURNS) -> list[Sample]:
    """Measure starts, tokens and updates of both contenders in turn."""
    python = vllm_python()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="pxe") as folder:
        models = _models(python, Path(folder))
        for turn in range(starts):
            say(f"{START.label()} ({turn + 1} of {starts})")
            samples += _started(python, Path(folder), models[SMALL], turn)
        for model, case, op in ((SMALL, TOKENS_OF, "generate"), (LARGE, UPDATE, "load")):
            with ExitStack() as stack:
                peers = {name: _peer(name, python, Path(folder), stack) for name in (GROUPED, ALONE)}
                for peer in peers.values():
                    peer.ask("open", timeout=300.0, folder=models[model])
                    if op == "load":
                        peer.ask("prepare", timeout=300.0)
                for turn in range(turns + 1):
                    say(f"{case.label()} ({turn} of {turns})")
                    for name in sorted(peers, reverse=bool(turn % 2)):
                        seconds = peers[name].ask(op, timeout=300.0)
                        if turn:
                            samples.append(Sample(case, name, seconds))
                say(f"note: load {os.getloadavg()[0]:.1f} after {case.label()}")
    return samples


def _models(python: Path, folder: Path) -> dict[str, str]:
    """Save the models with the version of transformers that will read them."""
    code = "import sys, pathlib; from bench.engines.setup import save_models; save_models(pathlib.Path(sys.argv[1]))"
    subprocess.run(
        [str(python), "-c", code, str(folder)], check=True, cwd=ROOT, env=contender_env(folder), timeout=120
    )
    return {name: str(folder / name) for name in (SMALL, LARGE)}


def _started(python: Path, folder: Path, model: str, turn: int) -> list[Sample]:
    """Start both. The group's driver is connected to Ray and has imported its modules."""
    samples: list[Sample] = []
    for name in (GROUPED, ALONE) if turn % 2 else (ALONE, GROUPED):
        with ExitStack() as stack:
            seconds = _peer(name, python, folder, stack).ask("open", timeout=300.0, folder=model)
            samples.append(Sample(START, name, seconds))
    return samples


def _peer(name: str, python: Path, folder: Path, stack: ExitStack) -> Peer:
    env = contender_env(folder)
    if name == ALONE:  # the group has it from its own options; all other ranks share the cores, as always
        env["OMP_NUM_THREADS"] = THREADS
    log = folder / f"{name}.log"
    peer = Peer(name, [str(python), "-m", _MODULES[name]], env, log, ROOT)
    stack.callback(peer.close)
    return peer
