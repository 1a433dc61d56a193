"""verl's own programs under both controllers, each run once for all tests that read it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.environment import PeerUnavailable, verl_python
from bench.trainers import programs
from bench.trainers.models import small_models
from bench.trainers.programs import Program
from bench.trainers.running import VERL, Ended, Running, start, variables
from tests.compat.overlay.stand_in import make_entry_point

HERE = Path(__file__).parent
PATIENCE = 420.0
"""Seconds that a run may take on a busy machine."""
PORT_TAKEN = "EADDRINUSE"
"""verl's controller releases a free port before a rank binds it, so another process may take the port."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, which need the environment of `make test-verl`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(3 * PATIENCE))
            if item.get_closest_marker("soak") is None:
                item.add_marker(pytest.mark.verl)
    # The most important tests run first: CI skips the rest if its time is over.
    items.sort(key=lambda item: item.path != HERE / "test_trainers.py")


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has verl."""
    try:
        return verl_python()
    except PeerUnavailable as error:
        pytest.fail(f"verl's environment: {error}")


@pytest.fixture(scope="session")
def data(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models, their tokenizer and rows to train on."""
    return small_models(python, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entry points of an installed Phalanx, which verl reads."""
    return make_entry_point(tmp_path_factory.mktemp("installed"))


@dataclass
class Runs:
    """Finished runs by program and controller. A run starts when a test first requests it."""

    python: Path
    data: Path
    folder: Path
    made: dict[tuple[str, str], Ended] = field(default_factory=dict)

    def of(self, name: str, controller: str) -> Ended:
        """Return the run of a program under a controller. Fail the test if the program failed."""
        if (name, controller) not in self.made:
            self.made[name, controller] = self._run(name, controller)
        return self.made[name, controller]

    def _run(self, name: str, controller: str) -> Ended:
        folder = self.folder / f"{name}-{controller}"
        if name == "sft_resumed":
            self._checkpoint_for(folder, controller)
        running = self.begin(self.program(name), controller, folder)
        ended = running.result(PATIENCE)
        if ended.code != 0 and controller == VERL and PORT_TAKEN in ended.text:
            running = self.begin(self.program(name), controller, folder)
            ended = running.result(PATIENCE)
        print(f"{name} under {controller}: {ended.seconds:.1f} s, steps at {ended.step_times()}")
        assert ended.code == 0, f"{name} under {controller} ended with {ended.code}:\n{running.tail(80)}"
        return ended

    def program(self, name: str) -> Program:
        made: dict[str, Callable[[], Program]] = {
            "sft": lambda: programs.sft(self.data, save_every=2),
            "sft_resumed": lambda: programs.sft(self.data),
            "main_ppo": lambda: programs.main_ppo(self.data),
            "main_ppo_v0": lambda: programs.main_ppo_v0(self.data),
            "main_ppo_critic": lambda: programs.with_critic(programs.main_ppo(self.data), self.data),
            "separate_async": lambda: programs.separate_async(self.data),
            "one_step_off_policy": lambda: programs.one_step_off_policy(self.data),
            "fully_async_policy": lambda: programs.fully_async_policy(self.data),
        }
        return made[name]()

    def begin(self, program: Program, controller: str, folder: Path, **env: str) -> Running:
        env.setdefault("PHALANX_TRACE", str(self.trace(folder)))
        return start(program, controller, self.python, self.data, folder, env=env)

    def trace(self, folder: Path) -> Path:
        return folder / "trace.json"

    def _checkpoint_for(self, folder: Path, controller: str) -> None:
        """Copy the checkpoint of the first run after two of its four steps."""
        self.of("sft", controller)
        left = self.folder / f"sft-{controller}" / "checkpoints"
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copytree(left / "global_step_2", folder / "checkpoints" / "global_step_2")
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")


@pytest.fixture(scope="session")
def runs(python: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of verl's programs, shared by all tests."""
    return Runs(python, data, tmp_path_factory.mktemp("runs"))


@dataclass(frozen=True)
class Interpreter:
    """Runs a few lines in verl's environment, with Phalanx importable."""

    python: Path
    data: Path
    folder: Path

    def environment(self, **env: str) -> dict[str, str]:
        """Return the environment of a trainer. `PATH_FIRST` is put first into `PYTHONPATH`."""
        made = variables(programs.sft(self.data), self.data, self.folder, None)
        first = env.pop("PATH_FIRST", "")
        made |= env
        made["PYTHONPATH"] = os.pathsep.join(filter(None, [first, made["PYTHONPATH"]]))
        return made

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS...`."""
        return subprocess.run(
            [str(self.python), *words],
            cwd=self.folder,
            env=self.environment(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )


@contextmanager
def cluster(interpreter: Interpreter) -> Iterator[str]:
    """Start a Ray cluster before any program, and yield its address."""
    folder = Path(tempfile.mkdtemp(prefix="pxv"))  # short, because it is part of paths of sockets
    words = ["start", "--head", "--block", "--port=0", f"--temp-dir={folder}", "--include-dashboard=false"]
    said = folder / "said.txt"
    with said.open("w") as output:
        process = subprocess.Popen(
            [str(interpreter.python), "-m", "ray.scripts.scripts", *words],
            env=interpreter.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _address(folder / "ray_current_cluster", process, said)
    finally:
        process.terminate()  # with --block, it ends its children
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _address(file: Path, process: subprocess.Popen[bytes], said: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the cluster did not start:\n{said.read_text()[-4000:]}")
        time.sleep(0.1)
    return file.read_text().strip()


@pytest.fixture
def interpreter(python: Path, data: Path, tmp_path: Path) -> Interpreter:
    """An interpreter with verl, in a folder of the test's own."""
    return Interpreter(python, data, tmp_path)
