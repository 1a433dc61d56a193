"""Virtual environments of verl and of vLLM, made from the package index, and the environment of every contender."""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """A virtual environment and its packages.

    Attributes:
        name: name of it and of its pins: packages in `NAME-requirements.txt`, versions in `NAME-constraints.txt`.
        first: packages that are installed first, since an unpinned torch brings gigabytes of GPU libraries.
        alone: a package that is installed without its dependencies; the requirements name the necessary dependencies.
        without: installed dependencies that do not work here, and are removed.
        proof: a module that can be imported in the end.
    """

    name: str
    first: tuple[str, ...]
    proof: str
    alone: str = ""
    without: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path:
        """File with the packages."""
        return HERE / f"{self.name}-requirements.txt"

    @property
    def constraints(self) -> Path:
        """File with their versions."""
        return HERE / f"{self.name}-constraints.txt"

    @property
    def pins(self) -> str:
        """All that determines the content."""
        told = (self.alone, *self.without) if self.without else (self.alone,)
        return "\n".join([self.requirements.read_text(), self.constraints.read_text(), *told, sys.version])


VERL = Environment("verl", ("torch", "ray"), "verl.single_controller.ray", alone="verl==0.9.1")
VLLM = Environment(
    "vllm",
    ("torch", "ray", "setuptools", "wheel"),
    "vllm.v1.engine.llm_engine",
    without=(
        "torchvision",
        "torchaudio",
        "torchcodec",
    ),  # builds for GPUs, which do not load beside a torch for CPUs
)


class PeerUnavailable(Exception):
    """The environment cannot be installed here, for the reason in the text."""


def environments() -> Path:
    """Return the folder of the environments of all clones: `PHALANX_ENVIRONMENTS`, else in the user's cache."""
    given = os.environ.get("PHALANX_ENVIRONMENTS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "phalanx" / "environments"


def verl_python(link: Path = ROOT / ".venv-verl") -> Path:
    """Return the interpreter of verl's environment; see `python_of`."""
    return python_of(VERL, link)


def vllm_python(link: Path = ROOT / ".venv-vllm") -> Path:
    """Return the interpreter of vLLM's environment; see `python_of`."""
    return python_of(VLLM, link)


def python_of(environment: Environment, link: Path) -> Path:
    """Return the interpreter of an environment, made on first use (two to four minutes).

    The environment is kept outside the clone under the hash of its pins, so that other clones find it. `link` points to
    it.

    Raises:
        PeerUnavailable: if it cannot be installed.
    """
    digest = hashlib.sha256(environment.pins.encode()).hexdigest()[:16]
    folder = environments() / f"{environment.name}-{digest}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    with _alone(folder):
        if not stamp.exists():
            _make(environment, folder, python)
            stamp.touch()
    _point(link, folder)
    return python


def _make(environment: Environment, folder: Path, python: Path) -> None:
    _step("make its environment", [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    constrained = [*pip, "install", "-c", str(environment.constraints)]
    _step(f"install {' and '.join(environment.first)}", [*constrained, *environment.first])
    _step("install what it uses", [*constrained, "-r", str(environment.requirements)])
    if environment.alone:
        _step(f"install {environment.alone}", [*pip, "install", "--no-deps", environment.alone])
    if environment.without:
        _step(
            f"take out {', '.join(environment.without)}", [*pip, "uninstall", "--yes", *environment.without]
        )
    _step("import it", [str(python), "-c", f"import {environment.proof}"])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of an environment: other processes wait while it is made."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PeerUnavailable(f"could not make its folder: {error}") from error
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _point(link: Path, folder: Path) -> None:
    """Set the link of this clone, unless a folder of an older version is in its place."""
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(folder)


def _step(what: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"could not {what}: {type(error).__name__}") from error
    if done.returncode:
        last = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()][-1:]
        raise PeerUnavailable(f"could not {what}: {' '.join(last)[:300]}")


def compile_sources() -> None:
    """Compile this source tree, as installing a package does: the contenders' own packages are compiled too."""
    for folder in ("src", "bench"):
        compileall.compile_dir(str(ROOT / folder), quiet=2)


def contender_env(temporary: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a contender, with this source tree importable and a folder for Ray's files."""
    env = dict(os.environ if base is None else base)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env["RAY_TMPDIR"] = str(temporary)
    for name in ("RAY_ADDRESS", "PHALANX_BACKEND", "VERL_DATAPROTO_SERIALIZATION_METHOD"):
        env.pop(name, None)
    return env


if __name__ == "__main__":
    print({"verl": verl_python, "vllm": vllm_python}[sys.argv[1] if sys.argv[1:] else "verl"]())
