"""A replacement that fails while ranks rejoin raises the cause, frees the ranks, and can be repeated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from tests.support.fault_workers import lose

OPTIONS: dict[str, Any] = {"static_graph": True, "bucket_cap_mb": 1}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Meeting(px.Worker):
    """Runs the collectives that a file names, in its constructor and in ``rejoin()``."""

    def __init__(self, plan: str) -> None:
        self.plan = Path(plan)
        if self.rejoining and self.plan.read_text() == "the new one raises":
            raise RuntimeError("not this time")
        dist.init_process_group("gloo")
        self.ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), **OPTIONS)
        torch.nn.init.constant_(self.ddp.module.bias, self.rank)
        if self.rejoining and self.plan.read_text() == "the new one makes one more":
            dist.all_reduce(torch.zeros(1))

    def rejoin(self) -> None:
        super().rejoin()
        if self.plan.read_text() == "the others make one more":
            dist.all_reduce(torch.zeros(1))

    @px.register
    def total(self) -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()


@pytest.fixture(scope="module")
def three(ray_cluster: None) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([3], use_gpu=False, backend="ray") as pool:
        yield pool


@pytest.mark.parametrize(
    ("plan", "error", "says"),
    [
        ("the new one raises", px.WorkerInitError, "not this time"),
        ("the new one makes one more", px.CallTimeout, "rank 0 .*__init__"),
        ("the others make one more", px.CallTimeout, "in rejoin"),
    ],
)
def test_ranks_are_freed_after_a_failed_replacement_and_another_attempt_works(
    three: px.ResourcePool, tmp_path: Path, plan: str, error: type[px.PhalanxError], says: str
) -> None:
    told = tmp_path / "plan"
    told.write_text(plan)
    with px.WorkerGroup(three, Meeting.bind(str(told))) as group:
        before = group.run(lambda worker: os.getpid())
        core, usual = group.core, group.core.options
        core.options = replace(usual, start_timeout=12.0)
        lose(group, 0, call=group.total)

        with pytest.raises(error, match=f"(?s){says}"):
            px.replace_ranks(group, state="none")
        state = group.state
        core.options = usual
        told.write_text("all make the same")
        replaced = px.replace_ranks(group, state="none")
        after = group.run(lambda worker: os.getpid())

        assert (state, replaced) == ("broken", (0,))
        assert group.run(lambda worker: worker.ddp.module.bias.item()) == [0.0, 1.0, 2.0]
        assert group.run(lambda w: (w.ddp.static_graph, w.ddp.bucket_bytes_cap)) == [(True, 2**20)] * 3
        assert group.total() == [3.0] * 3
        assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True]
