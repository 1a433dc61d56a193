"""Steps are committed atomically, kept as requested, and verified when they are read."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import phalanx as px
from phalanx.checkpoint.steps import Step, listed, read_step
from phalanx.checkpoint.storage import Storage
from tests.checkpoint.save_workers import saved, writing


def steps(path: Path) -> list[tuple[int, bool]]:
    return [(one.number, one.whole) for one in listed(str(path))]


def test_an_interrupt_while_old_steps_are_removed_keeps_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr(Step, "remove", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 2, keep=1)
    monkeypatch.undo()

    assert steps(tmp_path) == [(1, True), (2, True)]
    assert repr(saved(tmp_path, 3)).startswith(f"<Step 3 in {tmp_path}/")


def test_folders_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-20260101" / "data").mkdir(parents=True)
    saved(tmp_path, 1, keep=1)

    assert (tmp_path / "step-20260101" / "data").is_dir()


def test_the_last_commit_is_read_after_a_run_went_back_to_an_earlier_step(tmp_path: Path) -> None:
    for step in (1, 2, np.int64(3)):
        saved(tmp_path, step, keep=np.int64(3))

    saved(tmp_path, 2, data=b"of the other branch")

    assert read_step(str(tmp_path)).read("policy/rank-0") == b"of the other branch"
    assert [number for number, _ in steps(tmp_path)] == [1, 3, 2]


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"weight")])
def test_a_missing_or_short_file_is_named_before_a_step_is_read(tmp_path: Path, harm: Any) -> None:
    saved(tmp_path, 1)
    harm(Path(saved(tmp_path, 2).path("policy/rank-0")))

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"rank-0.*complete steps: 1") as caught:
        read_step(str(tmp_path))
    assert caught.value.files == ("policy/rank-0",)

    saved(tmp_path, 3)
    assert steps(tmp_path) == [(1, True), (2, False), (3, True)]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"digest"', b'"no digest"', "is damaged: it is not a manifest"),
        (b'"step": 2', b'"step": 3', "is damaged: its digest"),
        (b'"format": 2', b'"format": 3', "has format 3; .* reads formats 1 to 2: .*version"),
    ],
)
def test_a_last_step_with_a_damaged_manifest_is_not_skipped(
    tmp_path: Path, old: bytes, new: bytes, why: str
) -> None:
    saved(tmp_path, 1)
    manifest = Path(saved(tmp_path, 2).path("manifest.json"))
    manifest.write_bytes(manifest.read_bytes().replace(old, new))

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=rf"json {why}.*complete steps: 1"):
        read_step(str(tmp_path))
    assert read_step(str(tmp_path), 1).number == 1
    saved(tmp_path, 3)
    assert read_step(str(tmp_path)).number == 3


def test_a_step_under_removal_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = saved(tmp_path, 1)
    real = Storage.sizes

    def sizes(self: Storage) -> dict[str, int]:
        shutil.rmtree(step.folder, ignore_errors=True)  # after its manifest was read
        return real(self)

    monkeypatch.setattr(Storage, "sizes", sizes)

    assert [(one.committed, one.faults) for one in listed(str(tmp_path))] == [(False, ())]


def test_a_missing_step_is_refused_with_the_existing_steps(tmp_path: Path) -> None:
    with pytest.raises(px.checkpoint.CheckpointError, match=r"nothing was saved in .* yet"):
        read_step(str(tmp_path / "nothing"))
    saved(tmp_path, 1)
    with pytest.raises(px.checkpoint.CheckpointError, match="is a single step: give the folder above it"):
        read_step(str(tmp_path / "step-00000001"))
    with pytest.raises(px.checkpoint.CheckpointError, match=r"step 5 is not in .*: 1"):
        read_step(str(tmp_path), np.int64(5))  # type: ignore[arg-type]


def test_all_folders_of_a_step_are_on_the_disk_before_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{number}"), tmp_path))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with writing(tmp_path, 1) as writer:
        writer.write("groups/policy/worker/catalogue", b"x")
        writer.commit()

    at = next(index for index, name in enumerate(synced) if "manifest.json" in name)
    step = "step-00000001"
    assert {".", step, f"{step}/groups", f"{step}/groups/policy", f"{step}/groups/policy/worker"} <= {
        *synced[:at]
    }
    assert step in synced[at:]


def test_a_path_that_cannot_be_written_or_reached_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(px.checkpoint.CheckpointError, match="a file of that name: choose another path"):
        saved(tmp_path / "file", 1)

    with writing(tmp_path / "run", 1) as writer:
        shutil.rmtree(writer.folder)
        with pytest.raises(px.checkpoint.CheckpointError, match="its folder does not exist"):
            writer.write("state", b"x")

    with pytest.raises(px.checkpoint.CheckpointError, match="cannot be reached"):
        Storage("nowhere://bucket/run")
    with pytest.raises(px.checkpoint.CheckpointError, match=r"lost a slash.*as text: 's3://bucket/run'"):
        Storage(Path("s3://bucket/run"))


def test_a_file_of_a_store_is_visible_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = Storage(f"local://{tmp_path}")
    files = type(place._files)
    real = files.pipe_file
    seen: list[bytes | None] = []

    def looked_at(self: Any, path: str, data: bytes, **options: Any) -> None:
        real(self, path, data[:1], **options)  # a partial file exists at this moment
        seen.append(place.read("note"))
        real(self, path, data, **options)

    monkeypatch.setattr(files, "pipe_file", looked_at)

    place.write("note", b"before")
    place.write("note", b"after")

    assert seen == [None, b"before"]
    assert (place.read("note"), place.names()) == (b"after", ["note"])


@pytest.mark.parametrize("fails", ["makedirs", "pipe_file"])
def test_an_error_of_a_store_library_becomes_a_checkpoint_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    class NoCredentialsError(Exception):
        pass

    url = f"memory://{secrets.token_hex(4)}/run"
    place: Any = Storage(url)
    with writing(url, 1) as writer:
        monkeypatch.setattr(
            type(place._files), fails, Mock(side_effect=NoCredentialsError("Unable to locate"))
        )
        with pytest.raises(px.checkpoint.CheckpointError, match=r"NoCredentialsError.*permissions"):
            writer.write("policy/state", b"x")
        monkeypatch.undo()


def test_paths_may_contain_url_and_glob_syntax_and_only_steps_of_the_named_run_are_removed(
    tmp_path: Path,
) -> None:
    left, url = tmp_path / "a" / "step-00000007", f"memory://{secrets.token_hex(4)}"
    left.mkdir(parents=True)
    for run in ("run0", "run[0]"):
        saved(f"{url}/{run}", 1)
        saved(f"{url}/{run}", 2)

    saved(tmp_path / "a::b", 1)
    saved(f"{url}/run[0]", 3, keep=1)

    assert (steps(tmp_path / "a::b"), left.exists()) == ([(1, True)], True)
    assert [one.number for one in listed(f"{url}/run[0]") if one.whole] == [3]
    assert [one.number for one in listed(f"{url}/run0")] == [1, 2]
