"""The private parts of Ray that the library uses exist, and start no cluster once one was left."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private import utils

from phalanx.backends.ray import private
from tests.imports.source import MODULES

SCRIPT = Path(__file__).with_name("private_script.py")
PRIVATE = re.compile(
    r"ray\._private|ray\._raylet|_raylet import|_ray_actor|internal_kv|core_worker|_actor_method_call|_get_local_state"
)
STARTS_A_CLUSTER = {"get", "put", "wait", "kill", "cancel", "get_actor", "get_runtime_context", "nodes"}


@pytest.mark.slow
def test_private_parts_of_ray_work_on_a_cluster_and_start_none_after_it_was_left() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)

    assert (ran.returncode, ran.stdout) == (0, "the end\n"), ran.stdout + ran.stderr


def test_only_one_module_uses_private_parts_of_ray_and_calls_that_can_start_a_cluster() -> None:
    naming = [name for name, path in MODULES.items() if PRIVATE.search(path.read_text())]
    calls = [
        f"{name}:{node.lineno} ray.{node.attr}"
        for name, path in MODULES.items()
        if name.startswith("phalanx.backends.ray") and name != "phalanx.backends.ray.private"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "ray"
        and node.attr in STARTS_A_CLUSTER
    ]

    assert naming == ["phalanx.backends.ray.private"]
    assert calls == []


def test_an_incompatible_ray_is_an_import_error_with_the_tested_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(utils, "read_ray_address")
    with pytest.raises(ImportError, match=r"Ray \d+\.\d+.*read_ray_address.*tested version"):
        importlib.reload(private)
    monkeypatch.undo()
    importlib.reload(private)
