"""Use of a node by processes: memory, processor time, use of accelerators."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import NamedTuple

from phalanx.backends.ray import reaper

_TICK = os.sysconf("SC_CLK_TCK")
_QUERY = "index,uuid,utilization.gpu,memory.used,memory.total"
_GPUS_WITHIN_S = 3.0
_MIB = 2**20


class Usage(NamedTuple):
    """Usage of a process: resident bytes, processor seconds, and the monotonic time of the measurement."""

    memory: int
    cpu_s: float
    at: float


class Gpu(NamedTuple):
    """An accelerator: ``use`` in percent of the time, memory in bytes."""

    number: str
    uuid: str
    use: float | None
    used: int
    total: int


def usage_of(pid: int, started: int) -> Usage | None:
    """Return the usage of a process, None if the pid has ended or has another start time (clock ticks since boot)."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()  # proc(5): from field 3 on
        if int(fields[19]) == started:
            cpu_s = (int(fields[11]) + int(fields[12])) / _TICK
            return Usage(reaper.resident_bytes(pid), cpu_s, time.monotonic())
    return None


def gpus() -> list[Gpu]:
    """Return the NVIDIA accelerators of this node according to ``nvidia-smi``; none without that program."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_GPUS_WITHIN_S)
        return read_gpus(ran.stdout) if ran.returncode == 0 else []
    return []


def read_gpus(text: str) -> list[Gpu]:
    """Parse ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``; memory there is in MiB."""
    found: list[Gpu] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5:
            use, used, total = (_number(cell) for cell in cells[2:])
            found.append(Gpu(cells[0], cells[1], use, int((used or 0) * _MIB), int((total or 0) * _MIB)))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]", as of a partition
