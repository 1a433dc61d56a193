"""The error of a lost rank whose peers tell of it before Ray does: gloo is quicker than what looks after processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

import phalanx as px
from tests.support.late_deaths import untold

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Summing(px.Worker):
    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    @px.register
    def total(self, lost: int | None = None) -> float:
        import torch
        import torch.distributed as dist

        ones = torch.ones(1)
        dist.all_reduce(ones)
        if self.rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(ones)
        return ones.item()


@pytest.fixture
def group() -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([3], use_gpu=False, backend="ray") as pool:
        yield px.WorkerGroup(pool, Summing)


def test_the_lost_rank_is_the_cause_though_only_its_peers_have_told_of_it(group: px.WorkerGroup) -> None:
    with untold(group, [2]) as held:
        with pytest.raises(px.WorkerDiedError) as raised:
            group.total(2)

        assert len(held.refs) == 1

    assert raised.value.lost
    assert raised.value.cause_ranks == (2,)
    assert raised.value.causes[0].kind == "died"
    assert raised.value.victims == (0, 1)
    assert {"raised"} <= {one.kind for one in raised.value.failures[1:]}  # a connection that was reset
    assert group.state == "broken"
