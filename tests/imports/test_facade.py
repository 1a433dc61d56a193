"""`import phalanx` is light, and each public name has one place to come from."""

from __future__ import annotations

import ast
import collections
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

SOURCE = Path(phalanx.__file__).parent
HEAVY = ("ray", "torch", "numpy")


def declared_for_type_checkers() -> dict[str, str]:
    """Public name -> module, from the imports under ``if TYPE_CHECKING`` that editors and pyright read."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def facades() -> list[str]:
    """The packages whose ``__init__`` offers names; not the drop-in, whose names are another's."""
    names = [
        ".".join(("phalanx", *path.parent.relative_to(SOURCE).parts))
        for path in sorted(SOURCE.rglob("__init__.py"))
        if "__all__" in path.read_text()
    ]
    return [name for name in names if not name.startswith("phalanx.compat")]


def loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import phalanx").isdisjoint(HEAVY)


def test_listing_and_completing_names_loads_nothing_heavy() -> None:
    assert loaded_by("import phalanx; dir(phalanx), phalanx.__all__, phalanx.__version__").isdisjoint(HEAVY)


def test_errors_and_declarations_load_neither_ray_nor_torch() -> None:
    statement = "import phalanx as px; px.PhalanxError, px.register, px.Dispatch, px.Execute, px.Mesh"

    assert loaded_by(statement).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", phalanx.__all__)
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(phalanx, name) is not None


@pytest.mark.parametrize("name", phalanx.__all__)
def test_a_public_name_is_completed_by_dir(name: str) -> None:
    assert name in dir(phalanx)


@pytest.mark.parametrize("name", phalanx.__all__)
def test_type_checkers_see_the_object_that_is_loaded(name: str) -> None:
    home = importlib.import_module(declared_for_type_checkers()[name])

    assert getattr(home, name) is getattr(phalanx, name)


def test_type_checkers_see_exactly_the_public_names() -> None:
    assert sorted(declared_for_type_checkers()) == sorted(phalanx.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="WorkerGruop"):
        _ = phalanx.WorkerGruop  # pyright: ignore[reportAttributeAccessIssue]


def test_every_public_name_is_exported_from_one_facade() -> None:
    counted = collections.Counter(
        name for facade in facades() for name in importlib.import_module(facade).__all__
    )

    assert not [name for name, count in counted.items() if count > 1]


def test_the_version_is_the_one_of_the_distribution() -> None:
    assert f'version = "{phalanx.__version__}"' in (SOURCE.parents[1] / "pyproject.toml").read_text()
