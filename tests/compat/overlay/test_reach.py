"""The overlay on an installed verl: ways to install it, its effects, and its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from ray.runtime_env.runtime_env import _merge_runtime_env

from tests.compat.overlay.stand_in import make_entry_point, make_verl

pytestmark = pytest.mark.slow

OURS = "phalanx.compat.verl.single_controller.base.worker"
WHOSE = "from verl.single_controller import Worker; print(Worker.__module__)"
PLUGIN = "phalanx.compat.verl_plugin"
_VARIABLES = ("PHALANX_VERL", "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "RAY_ADDRESS")


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_verl(tmp_path_factory.mktemp("verl"))


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_entry_point(tmp_path_factory.mktemp("hook"))


def python(
    *words: str, path: list[Path], seconds: float = 280, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _VARIABLES and not name.startswith("PHALANX_")
    }
    paths = [*map(str, path), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**kept, "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled", **variables}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=seconds
    )


def run(script: str, *path: Path, **variables: str) -> str:
    done = python("-c", textwrap.dedent(script), path=list(path), **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def refusal(script: str, *path: Path, **variables: str) -> str:
    done = python("-c", textwrap.dedent(script), path=list(path), **variables)
    assert done.returncode != 0, done.stdout
    return done.stderr


INSTALL = "import phalanx.compat.verl; phalanx.compat.verl.install()\n"


def test_the_overlay_replaces_only_the_controller(verl: Path) -> None:
    output = run(
        INSTALL
        + """
import verl, verl.plugin.platform, verl.single_controller.base as base
print(verl.__version__, verl.DataProto.__module__, verl.plugin.platform.__file__.endswith("verl/plugin/platform.py"))
print(base.Worker.__module__)
""",
        verl,
    )

    assert output.split() == ["0.9.1", "verl.protocol", "True", OURS]


@pytest.mark.parametrize("asked", ["0", "1"])
def test_an_installed_phalanx_registers_verls_row_types(verl: Path, hook: Path, asked: str) -> None:
    script = """
import verl, phalanx as px

class Adder(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def add(self, data):
        return verl.DataProto(row + self.rank for row in data)

with px.ResourcePool([2], backend="inline") as pool:
    print(type(px.WorkerGroup(pool, Adder).add(verl.DataProto([1, 2, 3]))).__name__)
"""

    assert run(script, verl, hook, PHALANX_VERL=asked).strip() == "DataProto"


def test_registered_methods_pass_through_verls_transfer_queue_bridge(verl: Path) -> None:
    output = run(
        INSTALL
        + """
import verl.utils.transferqueue_utils as queue
queue.tqbridge = lambda dispatch_mode: lambda function: lambda *args: ("bridged", dispatch_mode.name)
from verl.single_controller.base.decorator import Dispatch, register
print(register(Dispatch.ONE_TO_ALL)(lambda self: None)(None))
""",
        verl,
    )

    assert output.strip() == "('bridged', 'ONE_TO_ALL')"


@pytest.mark.parametrize("words", [["-m", "trainer", "x=1"], ["{folder}/trainer.py", "x=1"]])
def test_the_command_runs_a_program_as_python_does(verl: Path, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "trainer.py").write_text(f"import sys; print(__name__, sys.argv[1:])\n{WHOSE}")
    words = [word.format(folder=tmp_path) for word in words]

    done = python("-m", "phalanx", "verl", *words, path=[verl, tmp_path])
    other = python("-m", "phalanx", "verl", sys.executable, "-c", WHOSE, path=[verl])

    assert done.stdout.split() == ["__main__", "['x=1']", OURS], done.stderr
    assert other.stdout.strip() == OURS, other.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "nothing to run"),
        (["-m"], "nothing to run"),
        (["nowhere.py"], "no program 'nowhere.py'"),
        (["ray", "job", "submit", "--", "python3", "train.py"], "before the command of the job"),
        (["{folder}/run.sh"], "cannot be run"),
    ],
)
def test_the_command_refuses_programs_that_cannot_run_or_would_run_without_the_overlay(
    verl: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    (tmp_path / "run.sh").write_text("")

    done = python("-m", "phalanx", "verl", *[word.format(folder=tmp_path) for word in words], path=[verl])

    assert (done.returncode, told in done.stderr) == (2, True), done.stderr


def test_a_program_keeps_its_exit_status_and_ends_without_a_last_garbage_collection(
    verl: Path, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text(
        "from phalanx.errors import PlacementError\nraise PlacementError('bad')"
    )
    (tmp_path / "ends.py").write_text(
        textwrap.dedent("""
        import os

        class Node:
            def __init__(self):
                self.itself = self

            def __del__(self, write=os.write):
                write(1, b"collected")

        Node()
        """)
    )

    failed = python("-m", "phalanx", "verl", str(tmp_path / "fails.py"), path=[verl])
    done = python("-m", "phalanx", "verl", str(tmp_path / "ends.py"), path=[verl])

    assert (failed.returncode, "Traceback" in failed.stderr) == (1, True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("policy", ["auto", "none"])
def test_child_processes_have_the_overlay_under_every_plugin_policy(verl: Path, policy: str) -> None:
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WHOSE!r}], check=True)"

    assert run(INSTALL + script, verl, VERL_USE_EXTERNAL_PLUGINS=policy).strip() == OURS


def test_an_installed_phalanx_applies_the_overlay_only_if_the_variable_is_set(verl: Path, hook: Path) -> None:
    assert run(WHOSE, verl, hook).strip() == "verl.single_controller"
    assert run(WHOSE, verl, hook, PHALANX_VERL="1").strip() == OURS
    # Unpickling a value may import the drop-in before verl.
    pickled = "import phalanx.compat.verl.single_controller, verl.single_controller as controller"
    script = f"{pickled}; print(controller.Worker.__module__)"
    assert run(script, verl, PHALANX_VERL="1").strip() == OURS


def test_install_is_refused_after_a_complete_or_partial_import_of_verl(verl: Path) -> None:
    controller = refusal("import verl.single_controller\n" + INSTALL, verl)
    part = refusal("import sys, verl.protocol; del sys.modules['verl']\n" + INSTALL, verl)

    assert "AlreadyImported" in controller
    assert "verl.single_controller was imported before" in controller
    assert "phalanx verl" in controller
    assert "verl 0.9.1" in part
    assert "left verl.protocol" in part
    assert "-c 'import verl'` shows the cause" in part


def test_the_plugin_is_imported_before_other_external_modules(verl: Path, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(WHOSE)
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import verl'], check=True)"

    assert run(INSTALL + script, verl, tmp_path, VERL_USE_EXTERNAL_MODULES="early").split() == [OURS]


@pytest.mark.parametrize(
    ("start", "asked"),
    [
        ("import phalanx.compat.verl; phalanx.compat.verl.install(overlay=True)", "0"),
        ("import phalanx.compat.verl", "1"),
    ],
)
def test_the_overlay_needs_an_installed_verl(start: str, asked: str) -> None:
    hide = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'verl' else f(n)\n"
    )

    told = refusal(hide + start, PHALANX_VERL=asked)

    assert "UnfitVerl" in told
    assert "pip install 'verl==0.9.1'" in told


@pytest.mark.parametrize(
    ("version", "without", "told"),
    [
        ("0.8.3", "", "version 0.8.3, but Phalanx serves verl 0.9.x"),
        ("0.10.0", "", "version 0.10.0, but Phalanx serves verl 0.9.x"),
        ("", "", "version unknown, but Phalanx serves verl 0.9.x"),
        (
            "0.9.1",
            "plugin/platform",
            "verl 0.9.1 in {folder}/verl is broken: it has no module verl.plugin.platform",
        ),
    ],
)
def test_an_unsupported_or_broken_verl_is_refused(
    tmp_path: Path, version: str, without: str, told: str
) -> None:
    error = refusal(INSTALL, make_verl(tmp_path, version, without)).splitlines()[-1]

    assert "UnfitVerl" in error
    assert told.format(folder=tmp_path) in error
    assert "pip install" in error
    assert str(tmp_path) in error


def test_another_patch_release_warns_and_the_command_refuses_an_unsupported_release(tmp_path: Path) -> None:
    done = python("-c", INSTALL + WHOSE, path=[make_verl(tmp_path / "new", "0.9.2.post1")])
    old = python("-m", "phalanx", "verl", "-m", "this", path=[make_verl(tmp_path / "old", "0.8.0")])

    assert done.stdout.strip() == OURS, done.stderr
    assert "verl 0.9.1" in done.stderr and "is version 0.9.2.post1" in done.stderr
    assert (old.returncode, old.stdout) == (2, "")
    assert old.stderr.startswith("phalanx: ")


def test_a_verl_that_cannot_be_imported_is_refused_with_the_cause(tmp_path: Path) -> None:
    (make_verl(tmp_path) / "verl" / "protocol.py").write_text("import nowhere")

    told = refusal("import phalanx.compat.verl.single_controller", tmp_path, PHALANX_VERL="1")
    error = told.splitlines()[-1]

    assert f"UnfitVerl: verl 0.9.1 in {tmp_path}/verl cannot be imported" in error
    assert "No module named 'nowhere'" in error


AFTER_RAY_INIT = """
from types import SimpleNamespace
import ray

ray.is_initialized = lambda: True
ray._private.worker._global_node = SimpleNamespace(is_head=lambda: {started})
ray.get_runtime_context = lambda: SimpleNamespace(runtime_env={environment})
import verl
from verl.single_controller import Worker; print(Worker.__module__)
"""


def test_the_overlay_is_refused_after_ray_init_unless_the_cluster_has_the_variable(
    verl: Path, hook: Path
) -> None:
    late = "import ray; ray.is_initialized = lambda: True\n" + INSTALL
    joined = AFTER_RAY_INIT.format(started=False, environment={})

    assert "Call it before ray.init" in refusal(late, verl)
    assert "import verl before it" in refusal(joined, verl, hook, PHALANX_VERL="1")
    for started, environment in ((True, {}), (False, {"env_vars": {"PHALANX_VERL": "1"}})):
        script = AFTER_RAY_INIT.format(started=started, environment=environment)
        assert run(script, verl, hook, PHALANX_VERL="1").strip() == OURS


JOB = """
import json, os, ray

def init(**told):
    told["job"] = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "null"))
    print(json.dumps(told, default=lambda config: config.runtime_env))

ray.init = init
import phalanx.compat.verl
phalanx.compat.verl.install()
from ray.job_config import JobConfig

ray.init({given})
"""


each_way = pytest.mark.parametrize("given", ["runtime_env={0}", "job_config=JobConfig(runtime_env={0})"])


@each_way
def test_jobs_on_a_running_cluster_get_the_overlay_and_the_settings_of_the_driver(
    verl: Path, given: str
) -> None:
    own = {"env_vars": {"A": "1", "VERL_USE_EXTERNAL_MODULES": "mine"}}
    told = json.loads(run(JOB.format(given=given.format(own)), verl, PHALANX_CALL_TIMEOUT="9"))
    runtime_env = told.get("runtime_env") or told["job_config"]

    assert runtime_env["env_vars"] == {
        "A": "1",
        "PHALANX_VERL": "1",
        "PHALANX_CALL_TIMEOUT": "9",
        "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},mine",
    }


@each_way
def test_variables_of_a_submitted_job_do_not_conflict_with_those_of_its_driver(
    verl: Path, given: str
) -> None:
    submitted = {"PHALANX_VERL": "1", "PHALANX_CALL_TIMEOUT": "9", "VERL_USE_EXTERNAL_MODULES": "mine"}
    job = json.dumps({"runtime_env": {"env_vars": submitted, "pip": ["x"]}, "metadata": {}})

    script = JOB.format(given=given.format({"env_vars": {"A": "1"}}))
    told = json.loads(run(script, verl, RAY_JOB_CONFIG_JSON_ENV_VAR=job, **submitted))
    # In the process of a job, Ray ignores job_config.
    merged: dict[str, Any] = _merge_runtime_env(told["job"]["runtime_env"], told["runtime_env"]) or {}

    assert merged["pip"] == ["x"]
    assert merged["env_vars"].pop("A", "1") == "1"
    assert merged["env_vars"] == {**submitted, "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},mine"}
