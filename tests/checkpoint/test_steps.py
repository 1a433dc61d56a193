"""Steps are written beside, committed at once, kept as asked, and compared when they are read."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.checkpoint.steps import Step, listed, open_step, read_step
from phalanx.checkpoint.storage import FileFacts, Storage


def save(path: Path, step: Any, *, keep: Any = None, data: bytes = b"weights") -> Step:
    with open_step(str(path), step, keep=keep) as writer:
        writer.write("policy/rank-0", data)
        writer.parts["policy"] = {"kind": "group", "ranks": 1}
        return writer.commit()


def steps(path: Path) -> list[int]:
    return [one.number for one in listed(str(path)) if one.whole]


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(tmp_path, 7)

    step = read_step(str(tmp_path))

    assert (step.number, step.read("policy/rank-0")) == (7, b"weights")
    assert step.parts == {"policy": {"kind": "group", "ranks": 1}}
    assert step.files["policy/rank-0"].size == 7


def test_a_step_is_not_there_before_its_commit(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with open_step(str(tmp_path), 2) as writer:
        writer.write("policy/rank-0", b"more")

        assert read_step(str(tmp_path)).number == 1


def test_what_is_abandoned_is_removed(tmp_path: Path) -> None:
    writer = open_step(str(tmp_path), 2)
    folder = Path(writer.part("policy"))

    writer.abandon()

    assert not folder.exists()
    assert listed(str(tmp_path)) == []


def test_no_more_steps_are_kept_than_asked(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)

    assert steps(tmp_path) == [3, 4]


def test_a_run_that_went_back_goes_on_from_its_last_commit(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)

    save(tmp_path, 2, data=b"of the other branch")

    assert read_step(str(tmp_path)).read("policy/rank-0") == b"of the other branch"
    assert steps(tmp_path) == [1, 3, 2]


@pytest.mark.parametrize("harm", ["missing", "shorter"])
def test_a_file_that_is_not_whole_is_named_before_anything_is_read(tmp_path: Path, harm: str) -> None:
    save(tmp_path, 1)
    step = save(tmp_path, 2)
    file = Path(step.path("policy/rank-0"))
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(b"weight")

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"policy/rank-0.*whole steps: 1") as caught:
        read_step(str(tmp_path))
    assert caught.value.files == ("policy/rank-0",)


def test_a_file_with_other_bytes_is_named_when_it_is_read(tmp_path: Path) -> None:
    step = save(tmp_path, 2)
    Path(step.path("policy/rank-0")).write_bytes(b"wEights")

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match="policy/rank-0"):
        read_step(str(tmp_path)).check()
    with pytest.raises(px.checkpoint.CheckpointCorrupted, match="policy/rank-0"):
        read_step(str(tmp_path)).read("policy/rank-0")


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    step = save(tmp_path, 2)
    manifest = Path(step.path("manifest.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 2', b'"step": 3'))

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"manifest\.json"):
        read_step(str(tmp_path))


def test_a_later_step_whose_manifest_is_damaged_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    Path(save(tmp_path, 2).path("manifest.json")).write_bytes(b'{"manifest": {')

    with pytest.raises(
        px.checkpoint.CheckpointCorrupted, match=r"step-00000002/manifest\.json is damaged: .*whole steps: 1"
    ):
        read_step(str(tmp_path))
    assert read_step(str(tmp_path), 1).number == 1
    save(tmp_path, 3)
    assert read_step(str(tmp_path)).number == 3


def test_a_step_of_another_format_is_not_called_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = Path(save(tmp_path, 2).path("manifest.json"))
    manifest.write_bytes(manifest.read_bytes().replace(b'"format": 2', b'"format": 3'))

    with pytest.raises(
        px.checkpoint.CheckpointCorrupted,
        match=r"has format 3; .* reads formats 1 to 2: .*version.*whole steps: 1",
    ):
        read_step(str(tmp_path))


def test_a_path_that_is_a_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")

    with pytest.raises(px.checkpoint.CheckpointError, match="a file of that name: choose another path"):
        save(tmp_path / "run", 1)


def test_a_step_that_is_being_removed_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = save(tmp_path, 1)
    real = Storage.sizes

    def sizes(self: Storage, folder: str) -> dict[str, int]:
        shutil.rmtree(step.folder, ignore_errors=True)  # after its manifest was read
        return real(self, folder)

    monkeypatch.setattr(Storage, "sizes", sizes)

    assert [(one.committed, one.faults) for one in listed(str(tmp_path))] == [(False, ())]


def test_a_step_that_is_removed_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reader = read_step(str(tmp_path))
    save(tmp_path, 2, keep=1)

    for read in (lambda: reader.read("policy/rank-0"), reader.check):
        with pytest.raises(px.checkpoint.CheckpointError, match="removed while it was read") as caught:
            read()
        assert not isinstance(caught.value, px.checkpoint.CheckpointCorrupted)


def test_a_damaged_step_is_left_by_the_next_save(tmp_path: Path) -> None:
    step = save(tmp_path, 1)
    Path(step.path("policy/rank-0")).unlink()

    save(tmp_path, 2)

    assert [(one.number, one.whole) for one in listed(str(tmp_path))] == [(1, False), (2, True)]


def test_without_steps_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(px.checkpoint.CheckpointError, match=r"nothing was saved in .* yet"):
        read_step(str(tmp_path / "nothing"))


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    save(tmp_path, 1)

    with pytest.raises(px.checkpoint.CheckpointError, match=r"step 5 is not in .*: 1"):
        read_step(str(tmp_path), 5)


def test_a_file_that_only_another_node_sees_fails_the_commit(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with open_step(str(tmp_path), 2) as writer:
        writer.files |= {"policy/rank-7": FileFacts(100, "ab")}

        with pytest.raises(px.checkpoint.CheckpointError, match="only one node sees"):
            writer.commit()
    assert steps(tmp_path) == [1]
    assert len(listed(str(tmp_path))) == 1


def test_a_full_disk_leaves_the_step_before_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_step(str(tmp_path), 2) as writer:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(px.checkpoint.CheckpointError, match="the disk is full"):
            writer.write("driver/state", b"x")
    monkeypatch.undo()

    assert steps(tmp_path) == [1]


def test_a_disk_that_is_full_at_the_manifest_leaves_the_step_before_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    real = os.fsync

    def full(number: int) -> None:
        if "manifest.json" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(px.checkpoint.CheckpointError, match="the disk is full"):
        save(tmp_path, 2, keep=1)

    assert [(one.number, one.whole) for one in listed(str(tmp_path))] == [(1, True)]


def test_all_folders_of_a_step_are_on_the_disk_before_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    real = os.fsync

    def fsync(number: int) -> None:
        kept.append(os.path.relpath(os.readlink(f"/proc/self/fd/{number}"), tmp_path))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with open_step(str(tmp_path), 1) as writer:
        writer.write("groups/policy/worker/catalogue", b"x")
        writer.commit()

    at = next(index for index, name in enumerate(kept) if "manifest.json" in name)
    step = "step-00000001"
    assert {".", f"{step}/groups", f"{step}/groups/policy", f"{step}/groups/policy/worker"} <= {*kept[:at]}
    assert step in kept[at:]


def test_a_path_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(px.checkpoint.CheckpointError, match="a part of the path is a file"):
        open_step(str(tmp_path / "file" / "run"), 1)


def test_a_path_that_was_cleaned_up_meanwhile_says_so(tmp_path: Path) -> None:
    writer = open_step(str(tmp_path / "run"), 1)
    shutil.rmtree(writer.folder)

    with pytest.raises(px.checkpoint.CheckpointError, match="its folder is gone"):
        writer.write("state", b"x")
    writer.abandon()


@pytest.mark.parametrize(
    "numbers",
    [
        {"step": -1},
        {"step": 1.0},
        {"step": "1"},
        {"step": True},
        {"step": 1, "keep": 0},
        {"step": 1, "keep": "2"},
    ],
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, numbers: dict[str, Any]) -> None:
    with pytest.raises(px.DeclarationError, match="give"):
        open_step(str(tmp_path), **numbers)


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    save(tmp_path, np.int64(3), keep=np.int64(2))

    assert read_step(str(tmp_path), np.int64(3)).number == 3  # type: ignore[arg-type]
    with pytest.raises(px.DeclarationError, match="step='3': give the number of a step"):
        read_step(str(tmp_path), "3")  # type: ignore[arg-type]


def test_a_file_of_a_store_is_seen_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = Storage(f"local://{tmp_path}")
    files = type(place._files)
    real = files.pipe_file
    seen: list[bytes | None] = []

    def looked_at(self: Any, path: str, data: bytes, **options: Any) -> None:
        real(self, path, data[:1], **options)  # who looks now sees the beginning
        seen.append(place.read("note"))
        real(self, path, data, **options)

    monkeypatch.setattr(files, "pipe_file", looked_at)

    place.write("note", b"before")
    place.write("note", b"after")

    assert seen == [None, b"before"]
    assert (place.read("note"), place.names()) == (b"after", ["note"])


def test_an_unknown_url_is_refused() -> None:
    with pytest.raises(px.checkpoint.CheckpointError, match="cannot be reached"):
        Storage("nowhere://bucket/run")


def test_a_url_that_became_a_path_is_refused() -> None:
    with pytest.raises(
        px.checkpoint.CheckpointError, match=r"lost a slash.*give it as text: 's3://bucket/run'"
    ):
        Storage(Path("s3://bucket/run"))


@pytest.mark.parametrize("fails", ["makedirs", "pipe_file"])
def test_what_only_a_store_raises_says_what_to_do(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    class NoCredentialsError(Exception):
        pass

    def refuse(*given: Any, **options: Any) -> None:
        raise NoCredentialsError("Unable to locate credentials")

    url = f"memory://{secrets.token_hex(4)}/run"
    place: Any = Storage(url)
    writer = open_step(url, 1)
    monkeypatch.setattr(type(place._files), fails, refuse)

    with pytest.raises(px.checkpoint.CheckpointError, match=r"NoCredentialsError: Unable to locate.*rights"):
        writer.part("policy")
        writer.write("state", b"x")
    monkeypatch.undo()
    writer.abandon()
