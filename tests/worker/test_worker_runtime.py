"""Calls and streams on the runtime of a rank, and the event loop of its ``async`` methods."""

from __future__ import annotations

import asyncio
import gc
import pickle
import signal
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

import phalanx as px
from phalanx.debug.rank_profile import ProfileOrder, arm_profile, end_profile
from phalanx.errors import DispatchError
from phalanx.wire.codec import encode
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import ANY_EPOCH, LIBRARY, RankCall
from phalanx.worker import handlers
from phalanx.worker.control import Interrupted
from phalanx.worker.worker_runtime import Loop, WorkerRuntime
from tests.worker.runtimes import empty_runtime, message, runtime_of


class Worker(px.Worker):
    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def give_up(self) -> None:
        raise GeneratorExit("gave up")

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
    return runtime_of(Worker)


def test_a_leaving_rank_refuses_calls_of_views_alone_and_a_rank_without_a_worker_all_calls(
    runtime: WorkerRuntime,
) -> None:
    handlers.leave(runtime)
    question = RankCall(ANY_EPOCH, "", LIBRARY, body=pickle.dumps(((handlers.meet,), {})))
    assert runtime.run(question.pack()) is None
    assert runtime.run(message("one")) is not None  # sent before
    with pytest.raises(RankFailure, match="this call of one belongs to epoch 0"):
        runtime.run(RankCall(0, "", "one").pack())
    with pytest.raises(DispatchError, match="in which the worker was not made"):
        empty_runtime().run_direct("", "double", (), {}, ("", 3, 0), encode)


def test_a_keyboard_interrupt_inline_is_raised_and_other_exceptions_are_failures_of_the_rank(
    runtime: WorkerRuntime,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        runtime.run(message("interrupt"))
    with pytest.raises(RankFailure, match="GeneratorExit: gave up"):
        runtime.run(message("give_up"))


def test_the_error_of_a_missing_module_names_pythonpath(here: px.ResourcePool) -> None:
    group = px.WorkerGroup(here, px.Worker)
    with pytest.raises(ModuleNotFoundError, match="PYTHONPATH"):
        group.run(lambda worker: __import__("nowhere_to_be_found"))


async def running() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_async_methods_share_one_loop_that_is_closed_with_its_rank() -> None:
    rank = Loop()
    first, second = rank.run(running()), rank.run(running())
    before = first.is_closed()
    del rank
    gc.collect()

    assert first is second
    assert (before, first.is_closed()) == (False, True)


def test_an_interrupted_call_has_ended_before_the_next_call_runs() -> None:
    loop, seen = Loop(), list[str]()

    async def first() -> None:
        try:
            sender.start()
            await asyncio.Event().wait()
        finally:
            seen.append("first ended")

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    sender = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        with pytest.raises(Interrupted):
            loop.run(first())
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)

    assert seen == ["first ended"]


@pytest.mark.parametrize("method", ["numbers", "numbers_async"])
def test_a_generator_whose_items_are_not_kept_runs_to_its_end(runtime: WorkerRuntime, method: str) -> None:
    assert runtime.run(message(method, keep=False)) is None
    assert runtime.instances[""].over


def test_streaming_a_method_that_does_not_yield_is_an_error(runtime: WorkerRuntime) -> None:
    with pytest.raises(RankFailure, match=r"returned a int: call it without \.stream\(\)"):
        next(runtime.stream(message("one")))


def test_a_profile_includes_a_stream_until_its_last_item(runtime: WorkerRuntime) -> None:
    arm_profile(runtime, "one", ProfileOrder(2))
    items = runtime.stream(message("numbers"))
    next(items)
    assert runtime.run(message("one")) == 1  # in the middle of the other call

    list(items)
    report = end_profile(runtime, "one")
    assert report.calls == ["numbers", "one"]
    assert report.trace is not None
