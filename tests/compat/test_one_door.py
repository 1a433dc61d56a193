"""The drop-in knows the library's runtime in one place."""

from __future__ import annotations

from tests.imports.source import MODULES, imports_of

DRIVER = (
    "phalanx.calls",
    "phalanx.group",
    "phalanx.members",
    "phalanx.session",
    "phalanx.pools",
    "phalanx.debug",
)


def test_only_one_module_of_the_drop_in_imports_the_runtime() -> None:
    of_drop_in = [module for module in MODULES if module.startswith("phalanx.compat")]

    knowing = [module for module in of_drop_in if any(name.startswith(DRIVER) for name in imports_of(module))]

    assert knowing == ["phalanx.compat.verl.single_controller.ray.native"]
