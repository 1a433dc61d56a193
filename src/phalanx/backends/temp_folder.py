"""Folders of temporary files that end with their process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile


def new_folder() -> str:
    """Return a new folder, which is removed when this process exits. A process that is killed leaves it."""
    path = tempfile.mkdtemp(prefix="phalanx-inline-")
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        shutil.rmtree(path, ignore_errors=True)
