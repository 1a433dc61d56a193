"""Full disks and read-only file systems, which are mounted if this machine allows it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import phalanx as px
from phalanx.checkpoint.steps import listed
from tests.checkpoint.save_workers import Bag


def mounted(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    at = tmp_path / "disk"
    at.mkdir()
    mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(at))
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def group(here: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(here[0:2], Bag.bind(w=torch.ones(1000)))


def test_a_full_disk_raises_an_error_keeps_the_previous_step_and_leaves_no_partial_model(
    small_disk: Path, group: px.WorkerGroup
) -> None:
    px.save(group, small_disk, step=1)
    group.put([{"w": torch.ones(2_000_000)}] * 2)

    with pytest.raises(px.checkpoint.CheckpointError, match="the disk is full"):
        px.save.submit(group, small_disk, step=2).result(60)
    # Of the smaller model, the disk can hold a step, but not the files too.
    for elements in (2_000_000, 600_000):
        group.put([{"w": torch.ones(elements)}] * 2)
        with pytest.raises(px.checkpoint.CheckpointError, match="the disk is full"):
            px.save(group, small_disk / "model", format="hugging face")

    assert [(one.number, one.whole) for one in listed(str(small_disk))] == [(1, True)]
    assert not list(small_disk.glob("model*"))
    px.load(group, small_disk)
    assert group[0].get()["w"].shape == (1000,)


def test_a_read_only_path_refuses_a_save_and_still_loads(small_disk: Path, group: px.WorkerGroup) -> None:
    px.save(group, small_disk, step=1)
    mounted("-o", "remount,ro", str(small_disk))

    with pytest.raises(px.checkpoint.CheckpointError, match="the file system is read-only"):
        px.save(group, small_disk, step=2)

    assert px.load(group, small_disk).step == 1
