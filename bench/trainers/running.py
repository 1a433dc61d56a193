"""Runs of verl's programs as a user starts them, under verl's controller or Phalanx, and their logged metrics."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environment import ROOT
from bench.trainers.programs import Program, environment

VERL, PHALANX = "verl", "phalanx"
CONTROLLERS = (VERL, PHALANX)
#: What verl itself does not repeat from run to run: seconds, and what is computed from them.
TIMINGS = ("timing", "perf/", "mfu", "time")


@dataclass(frozen=True)
class Line:
    """A line of output and its time, in seconds since the start of the program."""

    seconds: float
    text: str


@dataclass
class Ended:
    """An ended run: its exit code, its lines, and its metrics by step."""

    code: int
    seconds: float
    lines: list[Line]
    metrics: dict[int, dict[str, Any]]

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def values(self) -> dict[tuple[int, str], Any]:
        """Return (step, name) -> value of all logged metrics except times."""
        return {
            (step, name): value
            for step, found in self.metrics.items()
            for name, value in found.items()
            if not any(word in name for word in TIMINGS)
        }

    def step_times(self) -> list[float]:
        """Return the time at which each step was logged, in seconds since the start of the program."""
        return [line.seconds for line in self.lines if "step:" in line.text and " - " in line.text]


@dataclass
class Running:
    """A running program; `stop` and `result` end it."""

    process: subprocess.Popen[str]
    folder: Path
    begun: float
    lines: list[Line] = field(default_factory=list)
    _seen: threading.Condition = field(default_factory=threading.Condition)
    _reader: threading.Thread | None = None

    def read(self, also: Callable[[str], None] | None) -> None:
        self._reader = threading.Thread(target=self._read, args=(also,), daemon=True)
        self._reader.start()

    def _read(self, also: Callable[[str], None] | None) -> None:
        with self.process.stdout or io.StringIO() as output:
            for text in output:
                with self._seen:
                    self.lines.append(Line(time.monotonic() - self.begun, text.rstrip("\n")))
                    self._seen.notify_all()
                if also is not None:
                    also(text)

    def wait_for(self, words: str, timeout: float) -> Line:
        """Return the first line with these words.

        Raises:
            TimeoutError: if no such line arrives in time, or the program ended before.
        """
        deadline = time.monotonic() + timeout
        with self._seen:
            while (found := self._found(words)) is None and time.monotonic() < deadline:
                if self.process.poll() is not None:
                    break
                self._seen.wait(0.5)
        if found is None:
            raise TimeoutError(
                f"no line with {words!r} in {timeout:g} s (exit code {self.process.poll()}); the last are:\n"
                f"{self.tail()}"
            )
        return found

    def _found(self, words: str) -> Line | None:
        return next((line for line in self.lines if words in line.text), None)

    def tail(self, count: int = 40) -> str:
        return "\n".join(line.text for line in self.lines[-count:])

    def result(self, timeout: float) -> Ended:
        """Wait for the end. A program that takes longer is killed, and its exit code is that of a kill."""
        try:
            code = self.process.wait(max(0.0, timeout - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            self.stop()
            code = self.process.wait()
        seconds = time.monotonic() - self.begun
        self.stop()  # what it left running would hold the pipe
        if self._reader is not None:
            self._reader.join(20)
        return Ended(code, seconds, list(self.lines), logged(self.folder / "metrics.jsonl"))

    def stop(self) -> None:
        """Kill all processes that the program started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(
    program: Program,
    controller: str,
    python: Path,
    data: Path,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    also: Callable[[str], None] | None = None,
) -> Running:
    """Start `python -m MODULE ...`, or `phalanx verl -m MODULE ...`, in its own folder."""
    folder.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    process = subprocess.Popen(
        [*words_before(controller, python), *program.command()],
        cwd=folder,
        env=variables(program, data, folder, env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    running = Running(process, folder, begun)
    running.read(also)
    return running


def words_before(controller: str, python: Path) -> Sequence[str]:
    """Return the command before `-m`: Python, or Python and the command of Phalanx."""
    return [str(python)] if controller == VERL else [str(python), "-m", "phalanx", "verl"]


def variables(program: Program, data: Path, folder: Path, env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of a run. Phalanx is importable under both controllers, as if installed."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "VERL_", "PHALANX_", "OMP_"))
    }
    made = kept | dict(environment(data, program.accelerators))
    made["PYTHONPATH"] = os.pathsep.join([made["PYTHONPATH"], str(ROOT / "src")])
    made["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
    return made | dict(env or {})


def logged(path: Path) -> dict[int, dict[str, Any]]:
    """Return the entries of verl's file logger, step -> name -> value; two entries of a step are joined."""
    found: dict[int, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["step"], {}).update(entry["data"])
    return found


def differences(one: Ended, other: Ended) -> list[tuple[int, str, Any, Any]]:
    """Return (step, name, first value, second value) of all metrics that are not equal; NaN equals NaN."""
    first, second = one.values(), other.values()
    return [
        (*key, first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if repr(first.get(key)) != repr(second.get(key))
    ]
