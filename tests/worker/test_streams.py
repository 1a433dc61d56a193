"""A rank's side of a stream, on a runtime in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import phalanx as px
from phalanx.wire.failure import RankFailure
from phalanx.worker.handlers import arm_profile, end_profile
from phalanx.worker.profiling import ProfileOrder
from phalanx.worker.worker_runtime import WorkerRuntime
from tests.worker.runtimes import message, runtime_of


class Source(px.Worker):
    over = False

    def numbers(self) -> Iterator[int]:
        yield from (1, 2, 3)
        self.over = True

    async def numbers_async(self) -> AsyncIterator[int]:
        for number in self.numbers():
            yield number

    def one(self) -> int:
        return 1


@pytest.fixture
def runtime() -> WorkerRuntime:
    return runtime_of(Source)


@pytest.mark.parametrize("method", ["numbers", "numbers_async"])
def test_a_call_of_which_nothing_is_kept_runs_to_its_end(runtime: WorkerRuntime, method: str) -> None:
    assert runtime.run(message(method, keep=False)) is None
    assert runtime.instances[""].over


def test_what_does_not_yield_has_no_items(runtime: WorkerRuntime) -> None:
    with pytest.raises(RankFailure, match=r"it returned a int: call it without \.stream\(\)"):
        next(runtime.stream(message("one")))


def test_a_profile_lasts_until_the_last_item(runtime: WorkerRuntime) -> None:
    arm_profile(runtime, "one", ProfileOrder(2))
    items = runtime.stream(message("numbers"))
    next(items)
    assert runtime.run(message("one")) == 1  # in the middle of the other call

    list(items)
    report = end_profile(runtime, "one")
    assert report.calls == ["numbers", "one"]
    assert report.trace is not None
