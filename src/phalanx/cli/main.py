"""The command `phalanx`. Each subcommand is a module, imported when it is used: `--help` loads none."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx import __version__
from phalanx.errors import PhalanxError

#: Exit code of every command; `doctor` and `runs` use 1 for findings.
FAILED = 2

#: Commands in the order of `--help`, with their summaries.
COMMANDS = {
    "doctor": "Problems of this machine that concern ranks, each with its fix.",
    "top": "Live view of runs, groups and ranks: busy with which method since when, memory, CPU, GPU.",
    "stack": "Where each rank of a group stands now, also while it is inside native code or a collective.",
    "logs": "Output of the ranks of a group: of Python, of native libraries and of child processes.",
    "trace": "Summary of a trace: calls, p50 and p95 of times and bytes by method, and the idle share of each rank.",
    "runs": "Saved steps of a run: sizes, ages, contents, which are complete, and who writes there.",
    "verl": "Run a program of verl's with Phalanx as its single controller: your command, with two words before it.",
}

#: The modules with their functions, which have the names of the commands.
_MODULES = {
    "doctor": "phalanx.cli.doctor_command",
    "top": "phalanx.cli.top_command",
    "stack": "phalanx.cli.stack_command",
    "logs": "phalanx.cli.logs_command",
    "trace": "phalanx.cli.trace_command",
    "runs": "phalanx.cli.runs_command",
    "verl": "phalanx.cli.verl_command",
}


class PassThroughCommand(TyperCommand):
    """A command whose words belong to another program, except `--help` in the first place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words as they are."""
        return super().parse_args(ctx, args if args[:1] == ["--help"] else ["--", *args])


class LazyCommands(TyperGroup):
    """The commands of :data:`COMMANDS`; an error of the library becomes one message and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, as `--help` shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command if it is loaded, else a stand-in with its summary."""
        command = self.commands.get(cmd_name)
        if command is None and cmd_name in COMMANDS:
            return TyperCommand(cmd_name, help=COMMANDS[cmd_name])
        return command

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
    """Return the command of that name, ready to run."""
    module = importlib.import_module(_MODULES[name])
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, cls=PassThroughCommand if name == "verl" else None)(getattr(module, name))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyCommands,
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
    """Inspect the runs on a Ray cluster under Phalanx, and check a machine."""
