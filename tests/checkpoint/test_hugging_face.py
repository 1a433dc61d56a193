"""A model as a folder of safetensors files: what others read is what the ranks have, and the other way round."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import phalanx as px
from phalanx.checkpoint.model_folder import INDEX
from tests.checkpoint.save_workers import Bag, Rows, Trainer

SOAK_ON_RAY = True


@pytest.fixture
def two(backend: str) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([2], use_gpu=False) as made:
        yield made


def test_others_read_what_the_ranks_have(two: px.ResourcePool, tmp_path: Path) -> None:
    px.save(px.WorkerGroup(two, Rows), tmp_path / "model", format="hugging face")

    found = load_file(tmp_path / "model" / "model.safetensors")

    assert torch.equal(found["w"], torch.arange(24.0).view(8, 3))


@pytest.mark.slow_on_cluster
def test_files_are_cut_by_size_and_listed(two: px.ResourcePool, tmp_path: Path) -> None:
    group = px.WorkerGroup(two, Trainer)
    px.save(group, tmp_path / "model", format="hugging face", shard_bytes=100)

    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    listed = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]

    assert len(files) > 2
    values = group[0].values()
    for name, file in listed.items():
        assert torch.equal(load_file(tmp_path / "model" / file)[name], values[name])


@pytest.mark.slow_on_cluster
def test_ranks_load_what_others_wrote(two: px.ResourcePool, tmp_path: Path) -> None:
    save_file({"w": torch.arange(24.0).view(8, 3) + 1}, tmp_path / "model.safetensors")
    group = px.WorkerGroup(two, Rows)

    px.load(group, tmp_path, format="hugging face")

    assert torch.equal(torch.cat(group.get()), torch.arange(24.0).view(8, 3) + 1)


def test_a_state_of_tensors_is_a_model(two: px.ResourcePool, tmp_path: Path) -> None:
    group = px.WorkerGroup(two, Bag.bind(w=torch.ones(3, dtype=torch.bfloat16)))
    px.save(group, tmp_path / "model", format="hugging face")
    group.put([{"w": torch.zeros(3, dtype=torch.bfloat16)}] * 2)

    px.load(group, tmp_path / "model", format="hugging face")

    assert [one["w"].tolist() for one in group.get()] == [[1.0] * 3] * 2


def test_a_folder_that_is_there_is_left_alone(two: px.ResourcePool, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")

    with pytest.raises(px.checkpoint.CheckpointError, match="there already"):
        px.save(px.WorkerGroup(two, Rows), tmp_path, format="hugging face")

    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_names_that_the_folder_has_not_are_refused(two: px.ResourcePool, tmp_path: Path) -> None:
    save_file({"v": torch.zeros(2)}, tmp_path / "model.safetensors")

    with pytest.raises(px.checkpoint.CheckpointMismatch, match=r"not saved: model\.w"):
        px.load(px.WorkerGroup(two, Rows), tmp_path, format="hugging face")


def test_what_is_no_safetensors_file_is_named(two: px.ResourcePool, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"model\.safetensors"):
        px.load(px.WorkerGroup(two, Rows), tmp_path, format="hugging face")


def test_a_folder_that_is_not_there_is_named(two: px.ResourcePool, tmp_path: Path) -> None:
    with pytest.raises(px.checkpoint.CheckpointError, match="none has no safetensors files"):
        px.load(px.WorkerGroup(two, Rows), tmp_path / "none", format="hugging face")


def test_a_file_without_its_end_is_named_before_anything_is_loaded(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(two, Rows)
    save_file({"w": torch.zeros(8, 3)}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 4)

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"model\.safetensors is damaged.*its end"):
        px.load(group, tmp_path, format="hugging face")

    assert torch.equal(torch.cat(group.get()), torch.arange(24.0).view(8, 3))


def test_a_link_is_refused_before_the_model_is_written(two: px.ResourcePool, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")

    with pytest.raises(px.checkpoint.CheckpointError, match="link is there already"):
        px.save(px.WorkerGroup(two, Rows), tmp_path / "link", format="hugging face")
