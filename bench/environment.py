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
    """How a virtual environment is made.

    Attributes:
        name: of it, and of its pins: `NAME-requirements.txt` is what it gets, `NAME-constraints.txt` in which versions.
        first: packages that come first, since an unpinned torch brings gigabytes of GPU libraries.
        alone: a package that is installed without its dependencies; the requirements name those that it needs here.
        without: packages that were brought along and do not work here.
        proof: a module that can be imported in the end.
    """

    name: str
    first: tuple[str, ...]
    proof: str
    alone: str = ""
    without: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path:
        """What it gets."""
        return HERE / f"{self.name}-requirements.txt"

    @property
    def constraints(self) -> Path:
        """In which versions."""
        return HERE / f"{self.name}-constraints.txt"

    @property
    def pins(self) -> str:
        """All that decides what is in it."""
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
    """It cannot be installed here; the text says why."""


def environments() -> Path:
    """Where environments are kept for all clones: `PHALANX_ENVIRONMENTS`, else the user's cache folder."""
    given = os.environ.get("PHALANX_ENVIRONMENTS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "phalanx" / "environments"


def verl_python(link: Path = ROOT / ".venv-verl") -> Path:
    """The interpreter of verl's environment; see `python_of`."""
    return python_of(VERL, link)


def vllm_python(link: Path = ROOT / ".venv-vllm") -> Path:
    """The interpreter of vLLM's environment; see `python_of`."""
    return python_of(VLLM, link)


def python_of(environment: Environment, link: Path) -> Path:
    """The interpreter of an environment, made on first use (two to four minutes).

    It is kept outside the clone under the hash of its pins, so that another clone finds it; `link` points at it.
    Raises PeerUnavailable.
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
    """One process at a time makes an environment; others wait for it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PeerUnavailable(f"could not make its folder: {error}") from error
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _point(link: Path, folder: Path) -> None:
    """The link of this clone; an environment that an older version made in its place stays as it is."""
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
    """The environment of a contender: this source tree importable, Ray's files in a folder of its own."""
    env = dict(os.environ if base is None else base)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env["RAY_TMPDIR"] = str(temporary)
    for name in ("RAY_ADDRESS", "PHALANX_BACKEND", "VERL_DATAPROTO_SERIALIZATION_METHOD"):
        env.pop(name, None)
    return env


if __name__ == "__main__":
    print({"verl": verl_python, "vllm": vllm_python}[sys.argv[1] if sys.argv[1:] else "verl"]())
