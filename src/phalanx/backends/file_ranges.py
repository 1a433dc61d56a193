"""Reading a part of a file; what the backends share of it."""

from __future__ import annotations

import os


def read_file(path: str, offset: int, limit: int) -> bytes:
    """At most ``limit`` bytes from ``offset`` on; a negative offset counts from the end of the file.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    with open(path, "rb") as file:
        if offset < 0:
            offset = max(0, file.seek(0, os.SEEK_END) + offset)
        file.seek(offset)
        return file.read(limit)
