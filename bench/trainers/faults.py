"""Faults under verl's trainers and the errors that users see: `python -m bench.trainers.faults` shows all."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.environment import verl_python
from bench.trainers.models import small_models
from bench.trainers.processes import new_mark, processes
from bench.trainers.programs import SITE, Program, main_ppo, sft
from bench.trainers.running import CONTROLLERS, Line, Running, start

_ERROR = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Died|Timeout|Interrupt)\b")
STEPS = 400
"""More steps than any run takes."""


@dataclass(frozen=True)
class Fault:
    """A fault of a trainer after its first logged step.

    ``signal_of`` is sent to a rank's process; ``interrupt`` is Ctrl-C: its signal goes to the trainer's process group.
    """

    name: str
    program: Callable[[Path], Program]
    signal_of: signal.Signals | None = None
    interrupt: bool = False
    env: tuple[tuple[str, str], ...] = ()
    worker: str = "TrainingWorker"


@dataclass(frozen=True)
class Told:
    """The output that a user sees of a fault.

    ``seconds`` from the fault to the end (None: it had not ended), ``said`` to the first line that names an error.
    ``left`` are the processes that remained 5 s after the end; ``harmed`` is the process of the faulty rank.
    """

    seconds: float | None
    said: float | None
    code: int | None
    lines: list[Line]
    left: list[str]
    harmed: int | None = None

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


def long_sft(data: Path) -> Program:
    return sft(data, STEPS).having("trainer.total_epochs=1000")


def long_main_ppo(data: Path) -> Program:
    return main_ppo(data, STEPS).having("trainer.total_epochs=1000", "trainer.test_freq=-1")


def with_a_bad_row(data: Path) -> Program:
    return long_sft(data).having(f"data.custom_cls.path={SITE}/bad_row.py", "data.custom_cls.name=BadRow")


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("killed", long_sft, signal.SIGKILL),
        Fault("raised", with_a_bad_row),
        Fault("stopped", long_sft, signal.SIGSTOP),
        Fault("stopped_with_deadline", long_sft, signal.SIGSTOP, env=(("PHALANX_CALL_TIMEOUT", "10"),)),
        Fault("interrupted", long_sft, interrupt=True),
        Fault("main_ppo_killed", long_main_ppo, signal.SIGKILL, worker="WorkerDict"),
    )
}


def inflict(
    fault: Fault, controller: str, python: Path, data: Path, folder: Path, patience: float = 60.0
) -> Told:
    """Run the program, inject the fault after step 1, and wait at most ``patience`` seconds for the end."""
    mark = new_mark()
    env = dict(fault.env) | mark
    running = start(fault.program(data), controller, python, data, folder, env=env)
    harmed: int | None = None
    try:
        begun = running.wait_for("step:1 - ", 300).seconds + running.begun
        if fault.signal_of is not None:
            harmed = a_rank(mark, fault.worker)
            os.kill(harmed, fault.signal_of)
            begun = time.monotonic()
        elif fault.interrupt:
            os.killpg(running.process.pid, signal.SIGINT)
            begun = time.monotonic()
        return replace(_end(running, begun, mark, patience), harmed=harmed)
    finally:
        for pid, _ in processes(mark):
            os.kill(pid, signal.SIGKILL)


def _end(running: Running, begun: float, mark: dict[str, str], patience: float) -> Told:
    while running.process.poll() is None and time.monotonic() < begun + patience:
        time.sleep(0.05)
    ended = running.process.poll() is not None
    seconds = time.monotonic() - begun
    if ended:
        deadline = time.monotonic() + 5.0
        while processes(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
    left = [name for _, name in processes(mark)] if ended else []
    code = running.process.poll()
    after = [line for line in running.lines if line.seconds + running.begun >= begun]
    errors = [line.seconds + running.begun - begun for line in after if _ERROR.search(line.text)]
    return Told(seconds if ended else None, min(errors, default=None), code, after, left)


def a_rank(mark: dict[str, str], worker: str) -> int:
    """Return the process of the rank that was started last."""
    ranks = [pid for pid, name in processes(mark) if name.startswith("ray::") and worker in name]
    if not ranks:
        raise LookupError(f"no rank is alive; there are {[name for _, name in processes(mark)]}")
    return max(ranks)


def main(words: list[str]) -> None:
    """Print the output of each fault under each controller; names of faults and controllers select some."""
    names = [word for word in words if word not in CONTROLLERS]
    controllers = [word for word in words if word in CONTROLLERS] or CONTROLLERS
    python = verl_python()
    with tempfile.TemporaryDirectory(prefix="pxf") as folder:
        data = small_models(python, Path(folder) / "data")
        for name in names or FAULTS:
            for controller in controllers:
                told = inflict(FAULTS[name], controller, python, data, Path(folder) / f"{name}-{controller}")
                end = (
                    "had not ended after 60 s"
                    if told.seconds is None
                    else f"ended after {told.seconds:.1f} s"
                )
                print(
                    f"=== {name} under {controller}: error after {told.said} s, {end}, exit code {told.code}"
                )
                print(told.text)
                print(f"--- left 5 s later: {told.left}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
