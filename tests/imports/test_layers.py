"""Allowed imports, read from the source: the table of layers applies to every module under src/phalanx."""

from __future__ import annotations

import pytest

from tests.imports.source import MODULES, imports_of

# Modules of phalanx.weights below the driver's side: pure planning, and the parts that run on ranks.
WEIGHT_PLANNING = (
    "boxes",
    "buckets",
    "digests",
    "local_layout",
    "manifest",
    "name_matching",
    "plan",
    "transport_interface",
    "versions",
)
WEIGHTS_ON_RANKS = ("process_group", "ring", "shared_memory", "transports", "weight_ends", "weight_handlers")
CHECKPOINTS_ON_RANKS = ("model_folder", "planners", "rank_checkpoint", "step_files", "stored_state")

# Rows from low to high: a module imports from its own row and the rows above it. The longest prefix decides the row
# of a module. Packages that share a row are separated as their state is merged.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("phalanx.errors", "phalanx.api.lazy_names"),
    ("phalanx.config",),
    ("phalanx.topology",),
    ("phalanx.wire",),
    ("phalanx.display",),
    ("phalanx.tracing",),
    ("phalanx.declare",),
    ("phalanx.dispatch",),
    ("phalanx.collect",),
    tuple(f"phalanx.weights.{name}" for name in WEIGHT_PLANNING),
    ("phalanx.checkpoint.storage", "phalanx.checkpoint.steps"),
    ("phalanx.backends.backend_types",),
    ("phalanx.backends",),
    ("phalanx.backends.ray",),
    ("phalanx.backends.inline",),
    ("phalanx.worker", *(f"phalanx.weights.{name}" for name in WEIGHTS_ON_RANKS)),
    ("phalanx.debug.rank_profile", *(f"phalanx.checkpoint.{name}" for name in CHECKPOINTS_ON_RANKS)),
    ("phalanx.session",),
    ("phalanx.pools", "phalanx.group", "phalanx.calls", "phalanx.members"),
    ("phalanx.channels",),
    ("phalanx.weights",),
    ("phalanx.checkpoint",),
    ("phalanx.api", "phalanx.debug"),
    ("phalanx.parallel",),
    ("phalanx.engines",),
    ("phalanx", "phalanx.data"),
    ("phalanx.compat",),
    ("phalanx.cli",),
    ("phalanx.testing",),
    ("phalanx.__main__",),
)
# Packages that run on ranks never import the driver's side, nor a backend.
DRIVER = {f"phalanx.{name}" for name in ("session", "pools", "group", "calls", "members", "api", "debug")}
_BACKENDS = {row for layers in LAYERS for row in layers if row.startswith("phalanx.backends")}
ON_RANKS = {
    "phalanx.worker",
    "phalanx.debug.rank_profile",
    *(f"phalanx.weights.{name}" for name in WEIGHTS_ON_RANKS),
    *(f"phalanx.checkpoint.{name}" for name in CHECKPOINTS_ON_RANKS),
}
NEVER = {  # although it is in the rows above
    "phalanx.backends.inline": {"phalanx.backends.ray"},
    **dict.fromkeys(ON_RANKS, DRIVER | _BACKENDS),
}
MAY_USE_RAY = {"phalanx.backends.ray", "phalanx.compat"}
MAY_USE_COMPAT = {"phalanx.compat", "phalanx.cli"}  # `phalanx verl` puts it under a program of verl's
_ROWS = {layer: number for number, layers in enumerate(LAYERS) for layer in layers}


def row(module: str) -> str:
    """Return the row of ``module``. Public names, and modules that no row names, are in "phalanx"."""
    fitting = [layer for layer in _ROWS if module == layer or module.startswith(layer + ".")]
    return max(fitting, key=len)


def fault(module: str, imported: str) -> str | None:
    """Return why ``module`` may not import ``imported``, or None."""
    if imported.partition(".")[0] != "phalanx":
        return None
    mine, theirs = row(module), row(imported)
    if theirs == "phalanx.compat" and mine not in MAY_USE_COMPAT:
        return "nothing may use compat"
    if theirs in NEVER.get(mine, ()):
        return f"{mine} and {theirs} never import each other"
    if _ROWS[theirs] > _ROWS[mine]:
        return f"{theirs} is a row below {mine}"
    return None


def test_modules_import_only_from_their_own_row_and_the_rows_above() -> None:
    faults = {(m, name): why for m in MODULES for name in imports_of(m) if (why := fault(m, name))}

    assert not faults


def test_ray_is_imported_only_by_its_backend_and_the_drop_in() -> None:
    without = [module for module in MODULES if row(module) not in MAY_USE_RAY]
    names = {(module, name.partition(".")[0]) for module in without for name in imports_of(module)}

    assert [module for module, package in names if package == "ray"] == []


def test_only_the_drop_in_and_the_command_name_the_drop_in() -> None:
    others = [module for module in MODULES if row(module) not in MAY_USE_COMPAT]

    assert [module for module in others if "phalanx.compat" in MODULES[module].read_text()] == []


def test_only_one_module_of_the_drop_in_imports_the_drivers_side() -> None:
    of_drop_in = [module for module in MODULES if row(module) == "phalanx.compat"]
    side = tuple(DRIVER - {"phalanx.api"})

    knowing = [module for module in of_drop_in if any(name.startswith(side) for name in imports_of(module))]

    assert knowing == ["phalanx.compat.verl.single_controller.ray.native"]


def test_every_module_is_in_a_row_of_the_table() -> None:
    assert [name for name in MODULES if row(name) == "phalanx"] == ["phalanx"]


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("phalanx.errors", "phalanx.config"),
        ("phalanx.backends.inline", "phalanx.backends.ray.backend"),
        ("phalanx.worker.worker_runtime", "phalanx.backends.backend_types"),
        ("phalanx.testing.faults", "phalanx.compat.verl"),
        ("phalanx.api.worker_group", "phalanx.WorkerGroup"),
    ],
)
def test_the_table_forbids_an_import(module: str, imported: str) -> None:
    assert fault(module, imported) is not None
