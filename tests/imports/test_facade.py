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


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import phalanx").isdisjoint(HEAVY)


def test_listing_and_completing_names_loads_nothing_heavy() -> None:
    assert loaded_by("import phalanx; dir(phalanx), phalanx.__all__, phalanx.__version__").isdisjoint(HEAVY)


def test_submodules_load_nothing_heavy_before_a_name_is_used() -> None:
    statement = "import phalanx as px; px.weights, px.channels, px.checkpoint, px.data, px.debug, px.engines, px.errors"

    assert loaded_by(statement).isdisjoint(HEAVY)


def test_errors_and_declarations_load_neither_ray_nor_torch() -> None:
    statement = "import phalanx as px; px.PhalanxError, px.register, px.Dispatch, px.Execute, px.Mesh"

    assert loaded_by(statement).isdisjoint(HEAVY)


@pytest.mark.parametrize(("facade", "name"), NAMES)
def test_type_checkers_see_the_object_that_is_loaded(facade: str, name: str) -> None:
    loaded = getattr(importlib.import_module(facade), name)
    home = importlib.import_module(declared_for_type_checkers(facade)[name])

    assert loaded is not None
    assert getattr(home, name) is loaded


@pytest.mark.parametrize("facade", FACADES)
def test_type_checkers_see_exactly_the_public_names(facade: str) -> None:
    assert sorted(declared_for_type_checkers(facade)) == sorted(importlib.import_module(facade).__all__)


@pytest.mark.parametrize(("facade", "name"), NAMES)
def test_a_public_name_is_completed_by_dir(facade: str, name: str) -> None:
    assert name in dir(importlib.import_module(facade))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="WorkerGruop"):
        _ = phalanx.WorkerGruop  # pyright: ignore[reportAttributeAccessIssue]


def test_a_name_of_a_submodule_is_said_to_be_there() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'SamplingParams'; it is phalanx\.engines\.SamplingParams"
    ):
        _ = phalanx.SamplingParams  # type: ignore[attr-defined]  # pyright: ignore


def test_the_top_level_has_at_most_56_names() -> None:
    assert len(phalanx.__all__) <= 56


def test_the_version_is_the_one_of_the_distribution() -> None:
    assert f'version = "{phalanx.__version__}"' in (SOURCE.parents[1] / "pyproject.toml").read_text()
