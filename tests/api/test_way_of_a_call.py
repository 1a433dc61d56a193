"""The path of a call: few files of the library take part in it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

import phalanx as px


class Doubler(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def double(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2


def files_of(work: Any) -> list[str]:
    """Return the files of the library whose functions run during ``work()``, in the order of their first call."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if event == "call" and "/phalanx/" in path:
            seen.setdefault(path.rpartition("/phalanx/")[2])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return list(seen)


def test_a_blocking_call_of_rows_passes_at_most_8_files_of_the_runtime(here: px.ResourcePool) -> None:
    group, batch = px.WorkerGroup(here, Doubler), torch.ones(8, 2)
    group.double(batch)

    files = files_of(lambda: group.double(batch))

    driver = ("api/", "calls/", "group/", "members/", "session/", "pools/")
    assert len([file for file in files if file.startswith(driver)]) <= 8
    assert files[0] == "api/view.py"


def test_a_put_passes_at_most_12_files() -> None:
    with px.Channel(backend="inline") as channel:
        channel.put([1, 2])
        assert len(files_of(lambda: channel.put([3, 4]))) <= 12
