"""The reference lists every name of the controller that the installed verl uses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.compat.overlay.table import defined, imported, outside, table, touched


@pytest.fixture(scope="module")
def verl(python: Path) -> Path:
    code = "import importlib.util; print(importlib.util.find_spec('verl').origin)"
    return Path(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    ).parent


def test_every_name_that_verl_imports_is_in_the_reference(verl: Path) -> None:
    listed = {(module, name) for module, names in table("Imported").items() for name in names}

    used = imported(outside(verl))
    assert len(used) > 10
    assert used - listed == set()


def test_every_name_that_verl_touches_is_in_the_reference(verl: Path) -> None:
    listed = table("Touched")
    used = touched(outside(verl), defined(verl / "single_controller"))

    assert {"RayWorkerGroup", "Worker"} <= used.keys()
    assert {
        cls: names - listed.get(cls, set()) for cls, names in used.items() if names - listed.get(cls, set())
    } == {}
