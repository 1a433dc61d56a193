"""The peer's own virtual environment, made from the package index, and the environment of every contender."""

from __future__ import annotations

import compileall
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERL_REQUIREMENTS = Path(__file__).with_name("verl-requirements.txt")
VERL_CONSTRAINTS = Path(__file__).with_name("verl-constraints.txt")
VERL = "verl==0.9.1"


class PeerUnavailable(Exception):
    """The peer cannot be installed here; the text says why."""


def verl_python(folder: Path = ROOT / ".venv-verl") -> Path:
    """The interpreter of the peer's environment, made on first use (about two minutes).

    torch and ray come first and pinned, since an unpinned torch brings gigabytes of GPU libraries; verl is
    installed without its dependencies, of which its controller needs few. Raises PeerUnavailable.
    """
    python = folder / "bin" / "python"
    stamp = folder / "made-for.txt"
    wanted = VERL_REQUIREMENTS.read_text() + VERL_CONSTRAINTS.read_text() + VERL
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    _step("make its environment", [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _step("install torch and ray", [*pip, "-r", str(VERL_CONSTRAINTS)])
    _step("install what it uses", [*pip, "-c", str(VERL_CONSTRAINTS), "-r", str(VERL_REQUIREMENTS)])
    _step(f"install {VERL}", [*pip, "--no-deps", VERL])
    _step("import it", [str(python), "-c", "import verl.single_controller.ray"])
    stamp.write_text(wanted)
    return python


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
