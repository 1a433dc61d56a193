"""`import phalanx` is light, and each public name has one home."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from tests.imports.source import MODULES

SOURCE = Path(phalanx.__file__).parent
HEAVY = ("ray", "torch", "numpy")
FACADES = sorted(
    name
    for name, path in MODULES.items()
    if "lazy_names(__name__" in path.read_text() and not name.startswith("phalanx.compat")
)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


#: Packages and modules without tensors.
LIGHT = (
    "errors",
    "config",
    "topology",
    "declare",
    "tracing",
    "display",
    "checkpoint.storage",
    "checkpoint.steps",
)
LIGHT_MODULES = [name for name in MODULES if name.removeprefix("phalanx.").startswith(LIGHT)]
HELP = """
import contextlib, phalanx.cli.main
with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
    phalanx.cli.main.app(["--help"])
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import phalanx as px; dir(px), px.__all__, px.__version__",
        "from phalanx import weights, channels, checkpoint, data, debug, engines, errors",
        "from phalanx import PhalanxError, register, Dispatch, Execute, Mesh",
        f"import {', '.join(LIGHT_MODULES)}",
        HELP,
    ],
    ids=["names", "submodules", "errors and declarations", "layers without tensors", "help"],
)
def test_light_names_and_the_help_of_the_command_load_no_heavy_module(statement: str) -> None:
    assert loaded_by(statement).isdisjoint(HEAVY)


@pytest.mark.parametrize("facade", FACADES)
def test_each_public_name_can_be_loaded_and_dir_lists_it(facade: str) -> None:
    module = importlib.import_module(facade)

    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WorkerGruop", "WorkerGruop"),
        ("SamplingParams", r"no attribute 'SamplingParams'; it is phalanx\.engines\.SamplingParams"),
    ],
)
def test_an_unknown_name_is_an_attribute_error_that_names_its_submodule(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(phalanx, name)


def test_the_top_level_has_at_most_56_names_and_the_version_of_the_distribution() -> None:
    assert len(phalanx.__all__) <= 56
    assert f'version = "{phalanx.__version__}"' in (SOURCE.parents[1] / "pyproject.toml").read_text()
