"""Views of a group in other processes, while its owner replaces ranks or restarts it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.api.view import GroupView

pytestmark = pytest.mark.slow
BY_VALUE = True


class Trainer(px.Worker):
    """Ranks that meet in a collective at each step."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.total = torch.zeros(1)

    @px.register
    def train(self, x: float) -> float:
        part = torch.full((1,), x)
        dist.all_reduce(part)
        self.total += part
        return self.total.item()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


class Caller(px.Worker):
    """Calls a group that another process owns, and returns the names of errors."""

    @px.register
    def use(self, group: GroupView) -> None:
        self.group = group

    @px.register(px.Dispatch.RANK_ZERO)
    def train(self, x: float) -> list[float] | str:
        try:
            return self.group.train(x)
        except px.PhalanxError as error:
            return type(error).__name__


def until_it_goes_on(caller: px.WorkerGroup, x: float) -> list[float]:
    """Return the result of a call. It may be stale once, if its process did not know the change."""
    found = caller.train(x)
    return caller.train(x) if found == "StaleEpoch" else found


def test_calls_of_a_view_during_a_replacement_stop_no_other_rank_and_later_calls_work(
    ray_cluster: None,
) -> None:
    with px.ResourcePool([3], use_gpu=False, backend="ray") as pool:
        trainer = px.WorkerGroup(pool, Trainer, on_failure=px.ReplacePolicy(max_failures=9))
        caller = px.WorkerGroup(pool[0:1], Caller)
        caller.use(trainer)
        assert caller.train(1.0) == [3.0] * 3
        px.snapshot(trainer)
        processes = trainer.core.endpoints
        asked = [caller.train.submit(1.0) for _ in range(200)]
        px.replace_ranks(trainer, 1)
        ended = {one if isinstance(one, str) else "done" for one in px.gather(*asked)}

        assert ended <= {"done", "StaleEpoch", "WorkerDiedError", "GroupBroken", "RemoteCallError"}
        assert len(until_it_goes_on(caller, 1.0)) == 3
        stayed = [now is before for now, before in zip(trainer.core.endpoints, processes, strict=True)]
        assert stayed == [True, False, True]

        px.restore(trainer)
        px.replace_ranks(trainer, [0])
        assert until_it_goes_on(caller, 2.0) == [9.0] * 3
        trainer.restart()
        assert until_it_goes_on(caller, 1.0) == [3.0] * 3
