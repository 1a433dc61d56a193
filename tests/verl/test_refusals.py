"""Ways to make Phalanx verl's controller, and programs that end because it cannot be."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.verl.conftest import Interpreter, cluster

WHOSE = "import verl.single_controller.ray as c; print(c.RayWorkerGroup.__module__)"
OURS = "phalanx.compat.verl.single_controller.ray"
THEIRS = "verl.single_controller.ray.base"
PLUGIN = "phalanx.compat.verl_plugin"


def controller(ran: subprocess.CompletedProcess[str]) -> str:
    """Return the module of the controller, which the program printed last."""
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-3000:]
    return ran.stdout.split()[-1]


def own_module(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return str(folder)


def test_an_installed_phalanx_replaces_the_controller_only_if_the_variable_is_set(
    interpreter: Interpreter, plugin: Path
) -> None:
    unasked, asked = (
        interpreter.run("-c", WHOSE, PATH_FIRST=str(plugin), VERL_USE_EXTERNAL_MODULES="", **variables)
        for variables in ({}, {"PHALANX_VERL": "1"})
    )

    assert controller(unasked) == THEIRS
    assert controller(asked).startswith(OURS)


def test_an_earlier_plugin_that_imports_verls_controller_ends_the_process(
    interpreter: Interpreter, plugin: Path, tmp_path: Path
) -> None:
    early = own_module(tmp_path / "own", "early", "import verl.single_controller.base")

    ran = interpreter.run(
        "-c", WHOSE, PATH_FIRST=f"{plugin}:{early}", VERL_USE_EXTERNAL_MODULES="early", PHALANX_VERL="1"
    )

    assert ran.returncode != 0
    assert THEIRS not in ran.stdout
    assert "verl.single_controller" in ran.stderr and PLUGIN in ran.stderr


PROGRAM = """
import sys
import ray

@ray.remote
def whose():
    import verl.single_controller.ray as controller
    return controller.RayWorkerGroup.__module__

ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"MINE": "1"}})
print(ray.get(whose.remote()))
"""


COMMAND = ("-m", "phalanx", "verl")


@pytest.mark.parametrize(
    ("words", "submitted"),
    [((), {}), (COMMAND, {}), (COMMAND, {"PHALANX_VERL": "1", "PHALANX_CALL_TIMEOUT": "9"})],
    ids=["verl", "phalanx", "phalanx, as a job with variables"],
)
def test_tasks_on_an_existing_cluster_have_the_overlay_only_with_the_command(
    interpreter: Interpreter, tmp_path: Path, words: tuple[str, ...], submitted: dict[str, str]
) -> None:
    own_module(tmp_path, "program", PROGRAM)
    job = json.dumps({"runtime_env": {"env_vars": submitted}, "metadata": {}})
    told = {"RAY_JOB_CONFIG_JSON_ENV_VAR": job, **submitted} if submitted else {}  # as `ray job submit` does

    with cluster(interpreter) as address:
        ran = interpreter.run(*words, "program.py", address, **told)

    assert controller(ran).startswith(OURS if words else THEIRS)
