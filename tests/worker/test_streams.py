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
    def __init__(self) -> None:
        self.notes: list[str] = []

    def numbers(self) -> Iterator[int]:
        try:
            for number in (1, 2, 3):
                self.notes.append(f"made {number}")
                yield number
        finally:
            self.notes.append("over")

    async def numbers_async(self) -> AsyncIterator[int]:
        for number in self.numbers():
            yield number

    def one(self) -> int:
        return 1


@pytest.fixture
def runtime() -> WorkerRuntime:
    return runtime_of(Source)


def test_closing_it_in_the_middle_lets_the_method_clean_up_and_interrupts_the_call(
    runtime: WorkerRuntime,
) -> None:
    items = runtime.stream(message("numbers"))
    next(items)
    with pytest.raises(RankFailure) as raised:
        items.close()

    assert raised.value.report.kind == "cancelled"
    assert runtime.instances[""].notes == ["made 1", "over"]


@pytest.mark.parametrize("method", ["numbers", "numbers_async"])
def test_a_call_of_which_nothing_is_kept_runs_to_its_end(runtime: WorkerRuntime, method: str) -> None:
    assert runtime.run(message(method, keep=False)) is None
    assert runtime.instances[""].notes[-1] == "over"


def test_the_stream_of_another_epoch_is_refused(runtime: WorkerRuntime) -> None:
    with pytest.raises(RankFailure, match="belongs to epoch 2"):
        next(runtime.stream(message("numbers", epoch=2)))


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
