"""The command `phalanx`. Each subcommand is a file of its own, imported when it is used: `--help` loads none."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx import __version__
from phalanx.errors import PhalanxError

#: Exit code of every command; `doctor` uses 1 for "there are findings".
FAILED = 2


class Home(NamedTuple):
    """Where a command is, and what the list of commands says of it."""

    module: str
    function: str
    summary: str
    passes_on: bool = False
    """Whether the words after the command's name are another program's, whatever they look like."""


COMMANDS: dict[str, Home] = {
    "doctor": Home(
        "phalanx.cli.doctor",
        "doctor",
        "What is wrong with this machine for running ranks, and what to do about each thing.",
    ),
    "top": Home(
        "phalanx.cli.top_command",
        "top",
        "Live view of runs, groups and ranks: busy with which method since when, memory, CPU, GPU.",
    ),
    "stack": Home(
        "phalanx.cli.stack_command",
        "stack",
        "Where each rank of a group stands now, also while it is inside native code or a collective.",
    ),
    "logs": Home(
        "phalanx.cli.logs_command",
        "logs",
        "What the ranks of a group print: output of Python, of native libraries and of child processes.",
    ),
    "trace": Home(
        "phalanx.cli.trace_command",
        "trace",
        "Summary of a trace: per method calls, p50 and p95 of their times, bytes, and the idle share of each rank.",
    ),
    "runs": Home(
        "phalanx.cli.runs_command",
        "runs",
        "What a run has saved: steps, sizes, ages, what is in each, which are whole, and who writes there.",
    ),
    "verl": Home(
        "phalanx.cli.verl_command",
        "verl",
        "Run a program of verl's with Phalanx as its single controller: your command, with two words before it.",
        passes_on=True,
    ),
}


class Passing(TyperCommand):
    """A command that reads none of its words as an option, but for `--help` in the first place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words as they are."""
        return super().parse_args(ctx, args if args[:1] == ["--help"] else ["--", *args])


class Commands(TyperGroup):
    """The commands of :data:`COMMANDS`; what they raise of ours becomes one message and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names, as `--help` shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command if it is loaded, else what the list of commands needs of it."""
        found = self.commands.get(cmd_name)
        if found is None and cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name].summary)
        return found

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command that is to run."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except PhalanxError as error:
            typer.echo(f"phalanx: {error}", err=True)
            raise typer.Exit(FAILED) from None


def load(name: str) -> Any:
    """The command of that name, ready to run."""
    home = COMMANDS[name]
    function = getattr(importlib.import_module(home.module), home.function)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, cls=Passing if home.passes_on else None)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    name="phalanx",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 findings of doctor, 2 the command could not do its work.",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def phalanx(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """See what runs on a Ray cluster under Phalanx, and what is wrong with a machine."""
