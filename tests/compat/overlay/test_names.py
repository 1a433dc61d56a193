"""Names of the controller that verl uses, as the reference lists them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import phalanx.compat.verl
from tests.compat.overlay.table import CONTROLLER, defined, imported, outside, table, touched

HOME = Path(phalanx.compat.verl.__file__).parent / "single_controller"
BASES = {
    "SubRayResourcePool": ("RayResourcePool", "ResourcePool"),
    "RayResourcePool": ("ResourcePool",),
    "RayWorkerGroup": ("WorkerGroup",),
}


@pytest.mark.parametrize("module", list(table("Imported")))
def test_the_drop_in_has_the_names_that_verl_imports(module: str) -> None:
    ours = importlib.import_module(module.replace("verl", "phalanx.compat.verl", 1))

    assert [name for name in table("Imported")[module] if not hasattr(ours, name)] == []


@pytest.mark.parametrize("cls", list(table("Touched")))
def test_the_drop_in_has_the_attributes_that_verl_uses(cls: str) -> None:
    ours = defined(HOME)
    known = set().union(*(ours[name] for name in (cls, *BASES.get(cls, ()))))

    assert table("Touched")[cls] - known == set()


def test_imports_and_attributes_of_a_program_are_read_from_its_syntax_trees(tmp_path: Path) -> None:
    (tmp_path / "single_controller").mkdir()
    (tmp_path / "single_controller" / "group.py").write_text(
        "class Group:\n  size: int\n  def spawn(self): self.own = 1\n  def idle(self): ..."
    )
    (tmp_path / "trainer.py").write_text(
        f"from {CONTROLLER}.ray import A as B\nimport {CONTROLLER}.base\nwg.spawn(); wg.own; wg.size"
    )

    assert imported(outside(tmp_path)) == {(f"{CONTROLLER}.ray", "A"), (f"{CONTROLLER}.base", "")}
    assert touched(outside(tmp_path), defined(tmp_path / "single_controller")) == {
        "Group": {"spawn", "own", "size"}
    }
