"""Turns a process into a rank: environment and threads, before the user's modules are imported."""

from __future__ import annotations

import contextlib
import os
import sys

from phalanx.execution.output import to_own_file
from phalanx.wire.messages import RankSetup


def apply(setup: RankSetup, in_driver: bool) -> str | None:
    """Write the rank's environment into this process; ranks inside the driver's process swap it per call.

    Also makes the folder of the rank's files, and sends the output of a process of its own there.

    Returns:
        The file with the rank's output.
    """
    if setup.files:
        with contextlib.suppress(OSError):  # a full disk: whoever writes there says so
            os.makedirs(os.path.dirname(setup.files), exist_ok=True)
    if in_driver:
        return None
    log = to_own_file(setup)
    os.environ.update(setup.environment)
    torch = sys.modules.get("torch")
    if torch is not None and setup.threads:  # imported before us: its thread count is already fixed
        torch.set_num_threads(setup.threads)
    return log
