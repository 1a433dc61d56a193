"""``px.save`` and ``px.load`` of a group's state, on the same or another number of ranks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.checkpoint.step_files import DirectFile
from phalanx.checkpoint.steps import listed
from tests.checkpoint.save_workers import Bag, Nothing, Rows, Trainer, Unchanged
from tests.weights.weight_workers import same

SOAK_ON_RAY = True


@pytest.mark.slow_on_cluster
@pytest.mark.parametrize("steps", [1, 0], ids=["after a step", "before the first one"])
def test_a_loaded_group_trains_as_if_it_had_not_stopped(
    two: px.ResourcePool, tmp_path: Path, steps: int
) -> None:
    group = px.WorkerGroup(two, Trainer)
    for _ in range(steps):
        group.step()
    px.save(group, tmp_path, step=1)
    went_on = [group.step() for _ in range(3)]
    px.load(group, tmp_path)
    assert [group.step() for _ in range(3)] == went_on
    group.close()

    again = px.WorkerGroup(two, Trainer.bind(seed=7))
    with torch.device("meta"):  # a default device of the user, such as "cuda", does not apply
        px.load(again, tmp_path)

    assert [again.step() for _ in range(3)] == went_on


def test_a_save_does_not_change_the_checksum_option_of_torch(two: px.ResourcePool, tmp_path: Path) -> None:
    group = px.WorkerGroup(two, Trainer)
    px.save(group, tmp_path)
    px.save.submit(group, tmp_path).result()

    assert group.run(lambda _: torch.serialization.get_crc32_options()) == [True, True]


@pytest.mark.slow_on_cluster
def test_nested_states_keep_their_structure_and_values_by_rank_return_to_their_rank(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(two, Bag)
    nested = {
        "a": {"b": {0: torch.ones(2), "c": None}, "d": {}},
        "list": [torch.zeros(1), {"e": 3}],
        "t": (torch.ones(1),),
    }
    states = [
        {"own": torch.ones(3) * rank, "rank": rank, "same": [1, (2.5, "x")], **nested} for rank in range(2)
    ]
    group.put(states)
    px.save(group, tmp_path)
    group.put([{}, {}])

    px.load(group, tmp_path)

    found = group.get()
    assert [list(one) for one in found] == [["own", "rank", "same", "a", "list", "t"]] * 2
    assert [(one["own"][0].item(), one["rank"], one["same"]) for one in found] == [
        (0.0, 0, [1, (2.5, "x")]),
        (1.0, 1, [1, (2.5, "x")]),
    ]
    for one in found:
        assert one["a"]["b"][0].tolist() == [1.0, 1.0]
        assert (one["a"]["b"]["c"], one["a"]["d"], one["list"][1]) == (None, {}, {"e": 3})
        assert type(one["t"]) is tuple


def test_values_by_rank_are_refused_on_another_number_of_ranks_and_nothing_changes(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(two, Bag)
    group.put([{"seed": 0, "lr": 0.1}, {"seed": 1, "lr": 0.1}])
    px.save(group, tmp_path)
    alone = px.WorkerGroup(two[0:1], Bag.bind(lr=5.0))

    with pytest.raises(px.checkpoint.CheckpointMismatch, match=r"differed by rank.*parts=\['lr'\]"):
        px.load(alone, tmp_path)
    with pytest.raises(px.checkpoint.CheckpointMismatch, match="no part 'x'; it has lr, seed"):
        px.load(alone, tmp_path, parts=["x"])
    assert alone[0].get() == {"lr": 5.0}

    px.load(alone, tmp_path, parts=["lr"])
    assert alone[0].get() == {"lr": 0.1}
    alone.put([{"rng": 7}])  # no random generator of the library
    px.save(alone, tmp_path)
    px.load(group, tmp_path)
    assert group.get() == [{"rng": 7}] * 2


@pytest.mark.parametrize(
    ("source", "target"), [(2, 1), (2, 2), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow_on_cluster)]
)
def test_declared_boxes_are_loaded_on_the_same_and_other_numbers_of_ranks(
    four: px.ResourcePool, tmp_path: Path, source: int, target: int
) -> None:
    px.save(px.WorkerGroup(four[0:source], Rows), tmp_path)
    group = px.WorkerGroup(four[0:target], Rows.bind(fill=-1.0))
    px.load(group, tmp_path)

    assert torch.equal(torch.cat(group.get()), torch.arange(24.0).view(8, 3))


def test_a_submitted_save_has_the_state_at_its_submission_and_saves_run_in_order(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(two, Trainer)
    group.step()
    then = group.values()

    futures = [px.save.submit(group, tmp_path, step=step) for step in range(3)]
    group.step()
    group.step()

    assert [future.result(60).step for future in futures] == [0, 1, 2]
    assert [one.number for one in listed(str(tmp_path)) if one.whole] == [0, 1, 2]
    px.load(group, tmp_path)
    assert all(same(one, other) for one, other in zip(group.values(), then, strict=True))


@pytest.mark.filterwarnings("ignore:no state is kept of reference")
def test_roles_of_a_colocated_group_are_saved_by_name_and_loaded_together_or_one_by_one(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    cls = px.colocate({"actor": Trainer.bind(rng=False), "notes": Bag.bind(x=1), "reference": Nothing})
    group = px.WorkerGroup(two, cls)
    run = {"a": group.actor, "b": group.notes}
    group.actor.step()
    then = group.actor.values()
    saved = px.save(group, tmp_path / "saved")
    with px.checkpoint.CheckpointManager(tmp_path / "run", run) as manager:
        manager.save(1)
    assert sorted(path.name for path in Path(saved.folder).iterdir() if path.is_dir()) == ["actor", "notes"]

    def found_after(load: Callable[[], Any]) -> tuple[Any, Any]:
        group.actor.step()
        group.notes.put([{}, {}])
        load()
        return list(map(same, group.actor.values(), then)), group.notes.get()

    both, notes = ([True, True], [{"x": 1}] * 2), ([False, False], [{"x": 1}] * 2)
    assert found_after(lambda: px.load(group, tmp_path / "saved")) == both
    assert found_after(lambda: px.load(group.notes, tmp_path / "saved")) == notes
    assert found_after(lambda: px.load(group.notes, tmp_path / "run", name="b")) == notes
    with px.checkpoint.CheckpointManager(tmp_path / "run", run) as manager:
        assert found_after(manager.resume) == both


def test_a_save_warns_of_roles_without_a_state_unless_they_declare_it(
    here: px.ResourcePool, tmp_path: Path
) -> None:
    cls = px.colocate({"actor": Trainer, "critic": Nothing, "reference": Unchanged})
    group = px.WorkerGroup(here[0:1], cls)
    with pytest.warns(UserWarning, match="no state is kept of critic: a role that changes calls"):
        saved = px.save(group, tmp_path)
    px.load(group, tmp_path, parts=["model"])
    assert [path.name for path in Path(saved.folder).iterdir() if path.is_dir()] == ["actor"]


def test_a_worker_or_a_part_without_a_state_is_refused(two: px.ResourcePool, tmp_path: Path) -> None:
    group = px.WorkerGroup(two, Nothing)

    with pytest.raises(px.checkpoint.CheckpointError, match=r"nothing to save.*register_state"):
        px.save(group, tmp_path)
    with pytest.raises(px.RemoteCallError, match=r"count=int\): a part has .* or a dict of such objects"):
        group.run(lambda worker: px.register_state(worker, count=3))


def test_missing_and_unused_names_are_refused_and_nothing_changes(
    two: px.ResourcePool, tmp_path: Path
) -> None:
    group = px.WorkerGroup(two, Rows)
    px.save(group, tmp_path / "rows")
    trainer = px.WorkerGroup(two, Trainer.bind(rng=False), name="trainer")
    px.save(trainer, tmp_path / "trainer")
    before = trainer.values()

    with pytest.raises(px.checkpoint.CheckpointMismatch, match=r"^ranks 0, 1 of 'trainer': ") as caught:
        px.load(trainer, tmp_path / "rows")
    with pytest.raises(px.checkpoint.CheckpointMismatch, match=r"no rank loads .*optimizer"):
        px.load(group, tmp_path / "trainer", parts=["optimizer"])

    assert "parts=['model']" in str(caught.value)
    assert "Traceback" not in str(caught.value) and caught.value.__suppress_context__
    assert all(same(one, other) for one, other in zip(trainer.values(), before, strict=True))


PLAIN = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
state = {"model": {"w": torch.zeros(8, 3)}}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
assert torch.equal(state["model"]["w"], torch.arange(24.0).view(8, 3))
dcp_to_torch_save(sys.argv[1], sys.argv[2])
assert torch.equal(torch.load(sys.argv[2])["model"]["w"], state["model"]["w"])
assert "phalanx" not in sys.modules
"""


def test_a_process_without_phalanx_reads_a_saved_step(here: px.ResourcePool, tmp_path: Path) -> None:
    saved = px.save(px.WorkerGroup(here[0:2], Rows), tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, f"{saved.folder}/worker", tmp_path / "whole.pt"]
    subprocess.run(command, check=True)


def test_a_damaged_file_is_named_and_another_step_loads(two: px.ResourcePool, tmp_path: Path) -> None:
    group, other = px.WorkerGroup(two, Rows), px.WorkerGroup(two, Rows.bind(fill=-1.0))
    px.save(group, tmp_path, step=1)
    saved = px.save(group, tmp_path, step=2)
    file = Path(saved.folder) / "worker" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(np.float32(12.0).tobytes())] ^= 1
    file.write_bytes(data)

    with pytest.raises(px.checkpoint.CheckpointCorrupted, match=r"__1_0\.distcp"):
        px.load(other, tmp_path)

    assert all(torch.equal(part, torch.full((4, 3), -1.0)) for part in other.get())
    assert px.load(group, tmp_path, step=1).step == 1


@pytest.mark.parametrize(("owner", "writes"), [(DirectFile, "write"), (os, "pwrite")], ids=["step", "lock"])
def test_a_full_disk_leaves_the_previous_step_complete_and_no_lock(
    here: px.ResourcePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, writes: str
) -> None:
    group = px.WorkerGroup(here[0:2], Rows)
    px.save(group, tmp_path, step=1)
    monkeypatch.setattr(owner, writes, Mock(side_effect=OSError(errno.ENOSPC, "full")))

    for save in (px.save, lambda *given, step: px.save.submit(*given, step=step).result(60)):
        with pytest.raises(px.checkpoint.CheckpointError, match="the disk is full"):
            save(group, tmp_path, step=2)
    monkeypatch.undo()

    assert [one.number for one in listed(str(tmp_path))] == [1]
    assert px.load(group, tmp_path).step == 1
    assert px.save(group, tmp_path, step=2).step == 2


@pytest.mark.slow_on_cluster
def test_ranks_write_to_a_store_and_read_from_it(two: px.ResourcePool, tmp_path: Path) -> None:
    # A store like any other, to which every process of this machine has access.
    url = f"local://{tmp_path}/run"
    group = px.WorkerGroup(two, Rows)
    px.save.submit(group, url, step=1).result(60)
    px.save(group, url, step=2, keep=1)
    fresh = px.WorkerGroup(two, Rows.bind(fill=0.0))

    assert px.load(fresh, url).step == 2
    assert torch.equal(torch.cat(fresh.get()), torch.arange(24.0).view(8, 3))
    assert [one.number for one in listed(url)] == [2]


def test_a_trace_shows_saves_and_loads(two: px.ResourcePool, tmp_path: Path) -> None:
    group = px.WorkerGroup(two, Rows)

    with px.trace() as trace:
        px.save(group, tmp_path, step=5)
        px.load(group, tmp_path)

    assert "step 5" in str(trace.summary())
    assert {"write", "read"} <= {span.name for span in trace.events.spans}
