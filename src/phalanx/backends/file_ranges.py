"""Reading a part of a file, for all backends."""

from __future__ import annotations

import os


def read_file(path: str, offset: int, limit: int) -> bytes:
    """Return at most ``limit`` bytes from ``offset`` on; a negative offset counts from the end of the file.

    Raises:
        OSError: the file does not exist or cannot be read.
    """
    with open(path, "rb") as file:
        if offset < 0:
            offset = max(0, file.seek(0, os.SEEK_END) + offset)
        file.seek(offset)
        return file.read(limit)
