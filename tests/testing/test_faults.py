"""Fault injection for users on the inline backend, and the scripted backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.testing import faults
from phalanx.testing.clock import FakeClock
from phalanx.testing.scripted import scripted


class Adder(px.Worker):
    @px.register
    def add(self, number: int) -> int:
        return self.rank + number


class Fixed(Exception):
    def __setattr__(self, *attribute: Any) -> None:
        raise AttributeError(attribute)


@pytest.fixture
def group() -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([3], use_gpu=False, backend="inline") as pool:
        yield px.WorkerGroup(pool, Adder)


@pytest.mark.parametrize("order", [(1, 3), (3, 1)])
def test_injected_errors_are_raised_once_each_by_the_chosen_calls(
    group: px.WorkerGroup, order: tuple[int, int]
) -> None:
    for call in order:
        with pytest.raises(AttributeError):
            faults.raises(group, 1, method="ad")
        faults.raises(group, 1, Fixed(call), method="add", on_call=call)
    failed: dict[int, tuple[int, ...]] = {}
    for call in (1, 2, 3, 4):
        try:
            assert group.add(1) == [1, 2, 3]
        except Fixed as error:
            failed[call] = error.cause_ranks  # pyright: ignore[reportAttributeAccessIssue]

    assert failed == {1: (1,), 3: (1,)}


def test_a_slow_rank_delays_the_chosen_call_once(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=slept.append))
    faults.slow(group[1:], 2, 0.1, method="add", on_call=2)
    found = [(group.add(0), len(slept)) for _ in range(3)]

    assert found == [([0, 1, 2], 0), ([0, 1, 2], 1), ([0, 1, 2], 1)]
    assert slept == [0.1]


def test_a_fake_clock_advances_on_request_and_never_goes_back() -> None:
    clock = FakeClock(5.0)

    assert clock.advance(2.0) == clock.now() == 7.0
    assert clock.advance_to(6.0) == 7.0
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)


class Doubler(px.Worker):
    @px.register(px.Dispatch.ROWS)
    def double(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * rows


@pytest.mark.parametrize(
    ("event", "error"), [("slow", ""), ("raise", "by script"), ("hang", "expected a timeout")]
)
def test_a_call_waits_for_its_argument_as_the_script_says(event: Any, error: str) -> None:
    def script(what: str, number: int) -> Any:
        return event if (what, number) == ("call", 0) else "fine"

    with scripted(script) as backend, px.ResourcePool([2], use_gpu=False, backend="inline") as pool:
        double = px.WorkerGroup(pool, Doubler).double
        first = double.submit(torch.arange(2.0))
        with pytest.raises(px.PhalanxError, match=error) if error else nullcontext():
            assert double(first).tolist() == [0.0, 4.0]
        assert backend.clock.now() == (3.0 if event == "slow" else 0.0)


def test_the_scripted_backend_forgets_results_that_were_read() -> None:
    with scripted(lambda what, number: "fine") as backend, px.ResourcePool([1], backend="inline") as pool:
        group = px.WorkerGroup(pool, Doubler)
        for _ in range(20):
            group.double(torch.ones(1))

        assert len(backend._results) < 20
