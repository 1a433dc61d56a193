"""Files written past the page cache are what they would be through it, whatever is written and however it lies."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.storage.read_plan import fetches
from phalanx.checkpoint.storage.storage import file_facts
from phalanx.checkpoint.storage.tensor_index import Catalogue, Piece, StoredTensor
from phalanx.checkpoint.worker import disk
from phalanx.checkpoint.worker.disk import PAGE, DiskFile, DiskReader
from phalanx.checkpoint.worker.read import Files
from phalanx.checkpoint.worker.write import write_file
from phalanx.weights.planning.boxes import Patch, whole
from phalanx.weights.planning.shard_manifest import Held

LARGE = disk._LARGE
sizes = st.one_of(
    st.integers(0, 3 * PAGE),
    st.sampled_from(
        [LARGE - 1, LARGE, LARGE + 1, LARGE + PAGE, 3 * LARGE + 5, (1 << 20) - 1, (1 << 20) + PAGE]
    ),
)


def bytes_at(place: int, count: int, fill: int) -> memoryview:
    """So many bytes, at that place of a page of memory."""
    room = np.empty(count + 2 * PAGE, np.uint8)
    start = (place - room.__array_interface__["data"][0]) % PAGE
    data = room[start : start + count]
    data[:] = np.arange(count, dtype=np.int64) * 31 + fill
    found: Any = data
    return memoryview(found)


def written(path: Path, blocks: Sequence[memoryview], *, gaps: bool) -> bytes:
    """What should lie in the file, once it does."""
    expected = bytearray()
    with DiskFile(str(path)) as file:
        for block in blocks:
            gap = bytes(file.gap(block, 0) if gaps else 0)
            for data in (gap, block):
                file.write(data)
                expected += data
        file.finish()
    return bytes(expected)


@pytest.mark.parametrize("cache", ["past", "through"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(blocks=st.lists(st.tuples(st.integers(0, PAGE - 1), sizes), max_size=6), gaps=st.booleans())
def test_a_file_has_what_was_written(
    tmp_path: Path, cache: str, blocks: list[tuple[int, int]], gaps: bool
) -> None:
    found = [bytes_at(place, count, fill) for fill, (place, count) in enumerate(blocks)]
    with pytest.MonkeyPatch.context() as patch:
        if cache == "through":
            patch.setattr(disk, "_PAST_CACHE", 0)

        expected = written(tmp_path / "file", found, gaps=gaps)

    assert (tmp_path / "file").read_bytes() == expected


@pytest.mark.parametrize("taken", [1, PAGE, PAGE + 1, LARGE])
def test_what_the_system_takes_in_pieces_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    real = os.writev

    def short(number: int, parts: Sequence[Any]) -> int:
        return real(number, [parts[0][:taken]])

    monkeypatch.setattr(os, "writev", short)

    expected = written(tmp_path / "file", [bytes_at(8, 17, 0), bytes_at(64, LARGE + 99, 1)], gaps=True)

    assert (tmp_path / "file").read_bytes() == expected


def test_a_file_system_that_refuses_it_gets_the_file_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev
    flags: list[int] = []

    def refuse(number: int, parts: Sequence[Any]) -> int:
        flags.append(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT)
        if flags[-1]:
            raise OSError(errno.EINVAL, "not here")
        return real(number, parts)

    monkeypatch.setattr(os, "writev", refuse)

    expected = written(tmp_path / "file", [bytes_at(64, 2 * LARGE, 1)] * 2, gaps=True)

    assert (tmp_path / "file").read_bytes() == expected
    assert [bool(flag) for flag in flags] == [True, False, False]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A file that ends in the middle of a page, and what is in it."""
    path = tmp_path_factory.mktemp("read") / "file"
    return str(path), written(path, [bytes_at(0, (9 << 20) + 77, 5)], gaps=False)


@pytest.mark.parametrize("way", ["past the cache", "through the cache", "refused", "cached"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(start=st.integers(0, 9 << 20), place=st.sampled_from([None, 0, 64, 4095]), count=sizes)
def test_what_is_read_is_what_lies_there(
    file: tuple[str, bytes], way: str, start: int, place: int | None, count: int
) -> None:
    path, content = file
    into = bytes_at(start if place is None else place, count, 0)
    with pytest.MonkeyPatch.context() as patch:
        if way == "through the cache":
            patch.setattr(disk, "_PAST_CACHE", 0)
        if way == "refused":
            patch.setattr(disk, "_read_in_place", refused)
            patch.setattr(disk, "_read_copied", refused)
        with open(path, "rb") as other:
            if way == "cached":
                other.read()
            else:
                os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        with DiskReader(path) as reader:
            found = reader.read(start, into)

    wanted = content[start : start + count]
    assert (found, bytes(into[:found])) == (len(wanted), wanted)


def refused(*_: object) -> int:
    raise OSError(errno.EINVAL, "not here")


def test_a_large_tensor_is_written_from_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.from_numpy(np.frombuffer(bytes_at(64, 2 * LARGE, 1), np.float32))
    copied: list[int] = []
    real = DiskFile._gather
    monkeypatch.setattr(
        DiskFile, "_gather", lambda self, data: (copied.append(len(data)), real(self, data))[1]
    )

    written, _ = write_file(str(tmp_path / "file"), [b"before", tensor])

    assert (written[1].data - tensor.data_ptr()) % PAGE == 0
    assert sum(copied) < 4 * PAGE


@pytest.mark.parametrize("past_cache", [True, False])
def test_tensors_of_all_sizes_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_cache: bool
) -> None:
    if not past_cache:
        monkeypatch.setattr(disk, "_PAST_CACHE", 0)
    counts = {"small": 7, "page": 1024, "large": LARGE, "odd": LARGE + 321, "block": (9 << 20) // 4}
    tensors = {name: torch.arange(count, dtype=torch.float32) * 0.5 for name, count in counts.items()}

    items, facts = write_file(str(tmp_path / "file"), tensors.values())

    assert facts == file_facts(str(tmp_path / "file"))
    boxes = {name: whole(tuple(one.shape)) for name, one in tensors.items()}
    catalogue = Catalogue(
        1,
        {
            name: StoredTensor("float32", tuple(one.shape), (Piece("file", *item, boxes[name]),))
            for (name, one), item in zip(tensors.items(), items, strict=True)
        },
        {},
        {name: (name,) for name in tensors},
    )
    into = {name: torch.zeros_like(one) for name, one in tensors.items()}
    held = {
        name: Held("float32", tuple(one.shape), (Patch(boxes[name], (0,)),)) for name, one in tensors.items()
    }
    with Files(str(tmp_path)) as files:
        files.fill(catalogue, fetches(catalogue, held), into)
    assert all(torch.equal(into[name], one) for name, one in tensors.items())
    with open(tmp_path / "file", "rb") as file:  # as torch's own checkpoint reads an item
        file.seek(items[2].offset)
        assert torch.equal(torch.load(io.BytesIO(file.read(items[2].length))), tensors["large"])
