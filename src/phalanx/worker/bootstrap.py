"""Setup of a worker process as a rank: its environment, its output, and imports of users' modules."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Generator

from phalanx.display.log_merging import HEADER
from phalanx.topology.environment import THREADS
from phalanx.wire.messages import RankConfig


def apply(setup: RankConfig) -> str | None:
    """Set environment and output of a process of a rank; ranks in the driver's process swap the environment per call.

    Returns:
        The path of the file with the rank's output; None if it has no file.
    """
    log = _redirect_output(setup)
    os.environ.update(setup.environment)
    torch = sys.modules.get("torch")
    threads = setup.environment.get(THREADS, "")
    # If torch was imported before, its thread count is fixed already.
    if torch is not None and threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))
    return log


@contextlib.contextmanager
def importing() -> Generator[None, None, None]:
    """Import without garbage collections, which would visit the growing set of new objects again and again.

    Collections take an eighth of the time of ``import torch``. The imported objects are excluded from later collections
    too (``gc.freeze``), which would otherwise stop the rank for a tenth of a second at each collection of the oldest
    generation. If a module sets the collector's thresholds, or disables it, its settings remain.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(0, *others)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold() == (0, *others):
            gc.set_threshold(first, *others)


def _redirect_output(setup: RankConfig) -> str | None:
    """Send all output of this process, its native libraries and its children to the rank's file.

    The file replaces the file descriptors 1 and 2, so that the kernel has every byte at once and a killed process
    loses none, not even the interpreter's report of a crash.

    Returns:
        The path, or None if the file cannot be written: the output then stays where the backend has it.
    """
    if not setup.files:
        return None
    path = setup.files + ".log"
    devices = f"accelerator {','.join(setup.accelerator_ids)}, " if setup.accelerator_ids else ""
    header = (
        f"{HEADER}rank {setup.rank} of {setup.world_size}, {setup.label}, group {setup.group!r}, epoch {setup.epoch}, "
        f"host {setup.host}, {devices}pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(file, header.encode(errors="backslashreplace"))
    except OSError:
        return None
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    return path
