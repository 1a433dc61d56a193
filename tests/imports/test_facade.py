"""`import phalanx` is light, and each public name has one home."""

from __future__ import annotations

import ast
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
NAMES = [(facade, name) for facade in FACADES for name in importlib.import_module(facade).__all__]


def declared_for_type_checkers(facade: str) -> dict[str, str]:
    """Return the module of each public name, from the imports under ``if TYPE_CHECKING`` that editors read."""
    tree = ast.parse(MODULES[facade].read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.parametrize(
    "names",
    [
        "dir(px), px.__all__, px.__version__",
        "px.weights, px.channels, px.checkpoint, px.data, px.debug, px.engines, px.errors",
        "px.PhalanxError, px.register, px.Dispatch, px.Execute, px.Mesh",
    ],
    ids=["names", "submodules", "errors and declarations"],
)
def test_importing_the_package_and_using_its_light_names_loads_no_heavy_module(names: str) -> None:
    assert loaded_by(f"import phalanx as px; {names}").isdisjoint(HEAVY)


@pytest.mark.parametrize(("facade", "name"), NAMES)
def test_type_checkers_see_the_loaded_object_and_dir_lists_its_name(facade: str, name: str) -> None:
    loaded = getattr(importlib.import_module(facade), name)
    home = importlib.import_module(declared_for_type_checkers(facade)[name])

    assert loaded is not None
    assert getattr(home, name) is loaded
    assert name in dir(importlib.import_module(facade))


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
