"""The command itself: its list of commands, what it loads, how it ends."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from phalanx import __version__
from phalanx.cli import main
from phalanx.errors import PlacementError

runner = CliRunner()


def test_help_lists_every_command_with_its_summary() -> None:
    ran = runner.invoke(main.app, ["--help"])

    assert ran.exit_code == 0
    assert [name for name in main.COMMANDS if name not in ran.output] == []


def test_help_loads_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys\nfrom phalanx.cli.main import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ran.stderr.split())

    assert loaded.isdisjoint(
        {"ray", "torch", "numpy", *(f"phalanx.cli.{name}_command" for name in main.COMMANDS)}
    )


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    ran = runner.invoke(main.app, [name, "--help"])

    assert (ran.exit_code, "Usage" in ran.output) == (0, True)


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_the_summary_is_the_first_line_of_the_commands_own_help(name: str) -> None:
    function = getattr(importlib.import_module(f"phalanx.cli.{name}_command"), name)

    assert (function.__doc__ or "").splitlines()[0] == main.COMMANDS[name]


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "phalanx", "--version"], capture_output=True, text=True)

    assert (ran.returncode, ran.stdout) == (0, f"phalanx {__version__}\n")


def test_an_unknown_command_is_a_failure() -> None:
    assert runner.invoke(main.app, ["nothing"]).exit_code == main.FAILED


def test_an_error_of_ours_is_a_message_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise PlacementError("no room")

    monkeypatch.setitem(main.COMMANDS, "fails", "")
    monkeypatch.setitem(main._MODULES, "fails", "")
    monkeypatch.setattr(importlib, "import_module", lambda name: type("module", (), {"fails": fails}))

    ran = runner.invoke(main.app, ["fails"])

    assert (ran.exit_code, ran.stderr) == (main.FAILED, "phalanx: no room\n")
