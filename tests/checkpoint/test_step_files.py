"""Files are written and digested with and without the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.checkpoint import step_files
from phalanx.checkpoint.storage import Storage

BLOCK = step_files._BLOCK


def write_and_check(path: Path, sizes: list[int]) -> None:
    """Write parts of these sizes to a file, and check its content, position and digest."""
    content = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8).tobytes()
    files, rest = step_files.StepFiles(str(path.parent)), content
    with files.create_stream(str(path), "wb") as stream:
        for size in sizes:
            stream.write(rest[:size])
            rest = rest[size:]
        assert stream.tell() == len(content)
    assert files.facts[path.name] == Storage(path.parent).facts(path.name)
    assert path.read_bytes() == content


@pytest.mark.parametrize("cache", ["past", "through"])
@pytest.mark.parametrize("sizes", [[], [1], [BLOCK], [BLOCK - 1, 2], [5, 2 * BLOCK + 4096, 7], [3 * BLOCK]])
def test_a_file_has_the_bytes_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, sizes: list[int]
) -> None:
    if cache == "through":
        monkeypatch.setattr(step_files, "_O_DIRECT", 0)

    write_and_check(tmp_path / "file", sizes)


@pytest.mark.parametrize("most", [4096 << 8, 4097 << 8, 0])
def test_a_block_that_the_system_refuses_or_takes_in_parts_is_written_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.write

    def write(file: int, data: Any) -> int:
        if not most and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real(file, data[: most or None])

    monkeypatch.setattr(os, "write", write)

    write_and_check(tmp_path / "file", [BLOCK + 99])
