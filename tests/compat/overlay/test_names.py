"""Names of the controller that verl uses, as the reference lists them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import phalanx.compat.verl
from tests.compat.overlay.table import defined, table

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
