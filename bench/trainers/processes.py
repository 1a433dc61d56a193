"""Processes of a run, marked by a variable in their environment, and their CPU time."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

_VARIABLE = "BENCH_RUN"
_TICKS = os.sysconf("SC_CLK_TCK")
#: Where the times of a process and of its ended children stand in /proc/PID/stat, counted behind its name.
_TIMES = slice(11, 15)


def new_mark() -> dict[str, str]:
    """Return a variable that no other run has, for the environment of a run."""
    return {_VARIABLE: uuid.uuid4().hex}


def processes(mark: dict[str, str]) -> list[tuple[int, str]]:
    """Return (pid, name) of all living processes that have the mark in their environment."""
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{_VARIABLE}={mark[_VARIABLE]}".encode() in (entry / "environ").read_bytes():
                    name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append((int(entry.name), name.strip()))
            except OSError:
                continue  # it has ended, or is another user's
    return found


def cpu_seconds(mark: dict[str, str]) -> dict[str, float]:
    """Return the CPU time of all processes of a run so far, including ended processes, by kind.

    The kinds are `ranks`, `ray` (its servers and agents) and `others`: the program, its tasks and actors.
    """
    found = {"ranks": 0.0, "ray": 0.0, "others": 0.0}
    for pid, name in processes(mark):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[_kind(name)] += sum(map(int, fields[_TIMES])) / _TICKS
    return found


def _kind(name: str) -> str:
    if name.startswith("ray::"):
        return "ranks" if "TrainingWorker" in name or "WorkerDict" in name else "others"
    return "ray" if "/ray/" in name.split(" -m ")[0] else "others"
