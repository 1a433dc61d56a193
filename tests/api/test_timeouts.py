"""Seconds that a caller may give: no bound is said by None and by infinity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px

NO_BOUND = [None, float("inf"), 1e300]


class Counter(px.Worker):
    def __init__(self) -> None:
        self.count = 0

    @px.register
    def add(self, x: int = 1) -> int:
        self.count += x
        return self.count


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Iterator[Any]:
    made = px.WorkerGroup(pool[0:2], Counter, start_timeout=float("inf"), call_timeout=float("inf"))
    yield made
    made.close()


@pytest.mark.parametrize("seconds", NO_BOUND)
def test_a_call_and_its_future_take_no_bound(group: Any, seconds: float | None) -> None:
    future = group.add.options(timeout=seconds, stall_report_after=seconds).submit(0)

    assert future.result(timeout=seconds) == group.add(0)
    assert px.gather(group.add.submit(0), timeout=seconds) == [group.add(0)]
    assert dict(group.add.submit(0).stream(timeout=seconds)) == dict(enumerate(group.add(0)))
