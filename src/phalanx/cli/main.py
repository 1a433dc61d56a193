"""The command ``phalanx``. Packages other than typer and rich are imported only when a command runs."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from phalanx import __version__
from phalanx.cli.doctor_command import doctor
from phalanx.cli.file_commands import runs, trace
from phalanx.cli.rank_commands import logs, stack
from phalanx.cli.top_command import top
from phalanx.errors import PhalanxError

#: Exit code of a command that could not do its work; `doctor` and `runs` use 1 for findings.
FAILED = 2


class Commands(TyperGroup):
    """The group of commands. An error of the library is printed as a message, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except PhalanxError as error:
            typer.echo(f"phalanx: {error}", err=True)
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    cls=Commands,
    name="phalanx",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 findings of doctor or runs, 2 the command could not do its work.",
)
for command in (doctor, top, stack, logs, trace, runs):
    app.command()(command)

Words = Annotated[
    list[str] | None, typer.Argument(metavar="COMMAND...", help="-m MODULE, a file, or a program.")
]


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def verl(command: Words = None) -> None:
    """Run a program of verl with Phalanx as its single controller: put `phalanx verl` before your command.

    The installed verl is not modified; only `verl.single_controller` comes from Phalanx, in this process, in the actors
    and tasks of the program, and in all ranks. Needs verl 0.9.

    Examples:

      phalanx verl -m verl.trainer.main_ppo data.train_batch_size=8 ...

      phalanx verl train.py --steps 10

      phalanx verl python3 -m verl.trainer.sft_trainer_ray ...

      ray job submit -- phalanx verl -m verl.trainer.main_ppo ...

    Exit codes: of the program; 2 if Phalanx cannot be the controller, with the reason.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Replace this process, so that interrupts, errors and the exit code are the program's alone.
    os.execv(sys.executable, [sys.executable, "-m", "phalanx.cli.verl_program", *(command or ())])


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"phalanx {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


@app.callback()
def phalanx(version: Version = False) -> None:
    """Inspect drivers and ranks on a Ray cluster, traces and saved steps, and check a machine."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 lacks some characters
