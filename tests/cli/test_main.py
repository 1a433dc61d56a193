"""The ``phalanx`` command: its list of commands, its imports and its exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from phalanx import __version__
from phalanx.cli import main

COMMANDS = ("doctor", "top", "stack", "logs", "trace", "runs", "verl")
runner = CliRunner()


def test_help_lists_every_command_and_each_command_has_help() -> None:
    ran = runner.invoke(main.app, ["--help"])
    each = [runner.invoke(main.app, [name, "--help"]) for name in COMMANDS]

    assert ran.exit_code == 0
    assert [name for name in COMMANDS if name not in ran.output] == []
    assert [(one.exit_code, "Usage" in one.output) for one in each] == [(0, True)] * len(COMMANDS)
    assert runner.invoke(main.app, ["nothing"]).exit_code == main.FAILED


def test_phalanx_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "phalanx", "--version"], capture_output=True, text=True)

    assert (ran.returncode, ran.stdout) == (0, f"phalanx {__version__}\n")


@pytest.mark.parametrize(
    "words", [["-m", "mod", "--help"], ["train.py", "--steps", "1", "-m"], ["python3", "--", "--version"]]
)
def test_arguments_of_a_verl_program_are_passed_on(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(main.os, "execv", lambda path, args: run.append(args))
    runner.invoke(main.app, ["verl", *words])

    assert run == [[sys.executable, "-m", "phalanx.cli.verl_program", *words]]
