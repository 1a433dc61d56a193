"""`phalanx verl COMMAND`: a program of verl's, with this library as its single controller."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

_PROGRAM = "phalanx.cli.verl_program"


def verl(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND...", help="-m MODULE, a file, or a program.")
    ] = None,
) -> None:
    """Run a program of verl's with Phalanx as its single controller: your command, with two words before it.

    verl is the one that is installed, unmodified; only `verl.single_controller` comes from here, in this process, in
    the actors and tasks of the program, and in all ranks. Needs verl 0.9.

    Examples:

      phalanx verl -m verl.trainer.main_ppo data.train_batch_size=8 ...

      phalanx verl train.py --steps 10

      phalanx verl python3 -m verl.trainer.sft_trainer_ray ...

      ray job submit -- phalanx verl -m verl.trainer.main_ppo ...

    Exit codes: those of the program; 2 where Phalanx cannot be the controller, with the reason.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # In the place of this process: interrupts, errors and the exit code are then the program's alone.
    os.execv(sys.executable, [sys.executable, "-m", _PROGRAM, *(command or ())])
