"""The peer's own virtual environment, made from the package index, and the environment of every contender."""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERL_REQUIREMENTS = Path(__file__).with_name("verl-requirements.txt")
VERL_CONSTRAINTS = Path(__file__).with_name("verl-constraints.txt")
VERL = "verl==0.9.1"


class PeerUnavailable(Exception):
    """The peer cannot be installed here; the text says why."""


def environments() -> Path:
    """Where environments are kept for all clones: `PHALANX_ENVIRONMENTS`, else the user's cache folder."""
    given = os.environ.get("PHALANX_ENVIRONMENTS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "phalanx" / "environments"


def verl_python(link: Path = ROOT / ".venv-verl") -> Path:
    """The interpreter of the peer's environment, made on first use (about two minutes).

    It is kept outside the clone under the hash of its pins, so that another clone finds it; `link` points at it.
    torch and ray come first and pinned, since an unpinned torch brings gigabytes of GPU libraries; verl is installed
    without its dependencies: the requirements name those that its trainers need. Raises PeerUnavailable.
    """
    wanted = "\n".join([VERL_REQUIREMENTS.read_text(), VERL_CONSTRAINTS.read_text(), VERL, sys.version])
    folder = environments() / f"verl-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}"
    python, stamp = folder / "bin" / "python", folder / "complete"
    with _alone(folder):
        if not stamp.exists():
            _make_verl(folder, python)
            stamp.touch()
    _point(link, folder)
    return python


def _make_verl(folder: Path, python: Path) -> None:
    _step("make its environment", [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constrained = [*pip, "-c", str(VERL_CONSTRAINTS)]
    _step("install torch and ray", [*constrained, "torch", "ray"])
    _step("install what it uses", [*constrained, "-r", str(VERL_REQUIREMENTS)])
    _step(f"install {VERL}", [*pip, "--no-deps", VERL])
    _step("import it", [str(python), "-c", "import verl.single_controller.ray"])


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
    print(verl_python())
