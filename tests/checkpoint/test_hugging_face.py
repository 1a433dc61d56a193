"""Models as folders of safetensors files, which other programs can read and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import phalanx as px
from phalanx.checkpoint.model_folder import INDEX
from tests.checkpoint.save_workers import Bag, Rows, Trainer

SOAK_ON_RAY = True
MODEL = "model.safetensors"


@pytest.mark.slow_on_cluster
def test_safetensors_files_are_exchanged_with_other_programs_in_both_directions(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group, full = px.WorkerGroup(two, Rows), torch.arange(24.0).view(8, 3)
    with torch.device("meta"):  # a default device of the user, such as "cuda", does not apply
        px.save(group, tmp_path / "model", format="hugging face")
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["w"], full)

    save_file({"w": full + 1}, tmp_path / "model.safetensors")
    px.load(group, tmp_path, format="hugging face")
    assert torch.equal(torch.cat(group.get()), full + 1)


@pytest.mark.slow_on_cluster
def test_a_model_is_split_into_files_by_size_and_the_index_lists_its_tensors(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(two, Trainer)
    px.save(group, tmp_path / "model", format="hugging face", shard_bytes=100)

    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    listed = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]

    assert len(files) > 2
    (tmp_path / "own").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "own").stat().st_mode}
    values = group[0].values()
    for name, file in listed.items():
        assert torch.equal(load_file(tmp_path / "model" / file)[name], values[name])


def test_a_state_dict_of_tensors_is_saved_and_loaded_as_a_model(two: px.ResourcePool, tmp_path: Path) -> None:
    group = px.WorkerGroup(two, Bag.bind(w=torch.ones(3, dtype=torch.bfloat16)))
    px.save(group, tmp_path / "model", format="hugging face")
    group.put([{"w": torch.zeros(3, dtype=torch.bfloat16)}] * 2)

    px.load(group, tmp_path / "model", format="hugging face")

    assert [one["w"].tolist() for one in group.get()] == [[1.0] * 3] * 2
    group.put([{"w": torch.ones(3, dtype=torch.complex128)}] * 2)
    with pytest.raises(px.checkpoint.CheckpointError, match=r"w has type torch\.complex128, which"):
        px.save(group, tmp_path / "other", format="hugging face")

    group.put([{"first.w": torch.ones(3)}, {"last.w": torch.ones(2)}])  # stages of a pipeline
    px.save(group, tmp_path / "stages", format="hugging face")
    assert load_file(tmp_path / "stages" / MODEL).keys() == {"first.w", "last.w"}


def test_an_existing_folder_or_link_is_refused_and_left_alone(two: px.ResourcePool, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    group = px.WorkerGroup(two, Rows)

    for path, why in ((tmp_path, "exists already"), (tmp_path / "link", "link exists already")):
        with pytest.raises(px.checkpoint.CheckpointError, match=why):
            px.save(group, path, format="hugging face")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_model_is_loaded_from_model_safetensors_or_else_from_the_files_of_its_index(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    """Folders from hubs may also contain the same tensors in another layout."""
    group = px.WorkerGroup(two, Rows)
    for name, value in (("a", 3.0), ("b", 5.0)):
        save_file({"w": torch.full((8, 3), value)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "a.safetensors"}}')

    px.load(group, tmp_path, format="hugging face")
    assert torch.equal(torch.cat(group.get()), torch.full((8, 3), 3.0))

    save_file({"w": torch.full((8, 3), 7.0)}, tmp_path / "model.safetensors")
    px.load(group, tmp_path, format="hugging face")
    assert torch.equal(torch.cat(group.get()), torch.full((8, 3), 7.0))


WHOLE = save({"w": torch.zeros(8, 3)})


@pytest.mark.parametrize(
    ("files", "error", "why"),
    [
        ({MODEL: save({"v": torch.zeros(2)})}, px.checkpoint.CheckpointMismatch, r"not saved: model\.w"),
        ({MODEL: b"\xff" * 20}, px.checkpoint.CheckpointCorrupted, r"model\.safetensors"),
        ({MODEL: WHOLE[:-4]}, px.checkpoint.CheckpointCorrupted, r"model\.safetensors is damaged.*truncated"),
        (
            {INDEX: b'{"weight_map": {"w": "model-1.safetensors"}}'},
            px.checkpoint.CheckpointCorrupted,
            r"lacks model-1\.safetensors",
        ),
        (
            {INDEX: b"{", "other.safetensors": WHOLE},
            px.checkpoint.CheckpointCorrupted,
            r"index\.json is damaged",
        ),
        ({}, px.checkpoint.CheckpointError, "run has no safetensors files"),
    ],
    ids=["other names", "other bytes", "truncated", "a file is missing", "a damaged index", "no files"],
)
def test_a_folder_that_cannot_be_loaded_is_refused_before_anything_changes(
    two: px.ResourcePool, tmp_path: Path, files: dict[str, bytes], error: type[Exception], why: str
) -> None:
    group = px.WorkerGroup(two, Rows)
    (tmp_path / "run").mkdir()
    for name, content in files.items():
        (tmp_path / "run" / name).write_bytes(content)

    with pytest.raises(error, match=why):
        px.load(group, tmp_path / "run", format="hugging face")

    assert torch.equal(torch.cat(group.get()), torch.arange(24.0).view(8, 3))
