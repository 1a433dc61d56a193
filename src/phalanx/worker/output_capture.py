"""What a rank prints goes to a file of its own: its own lines, those of native libraries and of its children.

The file stands in place of the file descriptors 1 and 2, so that the kernel has every byte as soon as it was
written and nothing is lost with a process that is killed: also not what the interpreter says of a crash.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from phalanx.display.log_merging import HEADER
from phalanx.wire.messages import RankConfig


def to_own_file(setup: RankConfig) -> str | None:
    """Send all output of this process to the rank's file from now on; its path, or None where it cannot be written."""
    if not setup.files:
        return None
    path = setup.files + ".log"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return None  # what is printed then stays where the backend has it
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os.write(file, _header(setup).encode(errors="backslashreplace"))
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    return path


def _header(setup: RankConfig) -> str:
    devices = f"accelerator {','.join(setup.accelerator_ids)}, " if setup.accelerator_ids else ""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"{HEADER}rank {setup.rank} of {setup.world_size}, {setup.label}, group {setup.group!r}, epoch {setup.epoch}, "
        f"host {setup.host}, {devices}pid {os.getpid()}, since {since}\n"
    )
