"""Ranks whose ends of calls are written in a script."""

from __future__ import annotations

import pytest
import torch

import phalanx as px
from phalanx.testing.scripted import scripted


class Doubler(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def double(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * rows


@pytest.mark.parametrize("event", ["fine", "raise"])
def test_a_future_of_rows_ends_as_a_call_does(event: str) -> None:
    def script(what: str, number: int) -> str:
        return event if what == "call" else "fine"

    with scripted(script), px.ResourcePool([2], use_gpu=False, backend="inline") as pool:  # pyright: ignore[reportArgumentType]
        future = px.WorkerGroup(pool, Doubler).double.submit(torch.arange(4.0))
        if event == "fine":
            assert future.result().tolist() == [0.0, 2.0, 4.0, 6.0]
        else:
            with pytest.raises(px.RemoteCallError, match="by script"):
                future.result()


def test_results_that_are_read_are_forgotten() -> None:
    with scripted(lambda what, number: "fine") as backend, px.ResourcePool([1], backend="inline") as pool:
        group = px.WorkerGroup(pool, Doubler)
        for _ in range(20):
            group.double(torch.ones(1))

        assert len(backend._results) < 20
