"""Calls on the runtime of a rank in this process; nothing is sent, so no backend is needed."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.collect.failures import combine
from phalanx.errors import DispatchError
from phalanx.topology.slots import SlotFacts
from phalanx.tracing.events import TrackKey
from phalanx.tracing.spans import path_of, read_log
from phalanx.wire.codec import encode
from phalanx.wire.failure import RankFailure
from phalanx.wire.messages import ANY_EPOCH, Message, RankCall, RankConfig, library_call
from phalanx.worker import handlers
from phalanx.worker.worker_runtime import WorkerRuntime


class Services:
    in_driver = True

    def __init__(self) -> None:
        self._ids = itertools.count(70000)

    def facts(self) -> tuple[SlotFacts, tuple[str, ...]]:
        return SlotFacts("n", "h", "127.0.0.1", (), 1), ()

    def call_id(self) -> int:
        return next(self._ids)

    def folder(self) -> str:
        return ""

    def put(self, value: Any) -> Any:
        return value

    def fetch(self, refs: Sequence[Any], timeout: float | None = None) -> list[Any]:
        return list(refs)


class Worker(px.Worker):
    def ping(self) -> int:
        return self.rank

    async def wait(self) -> str:
        return "waited"

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def give_up(self) -> None:
        raise GeneratorExit("gave up")


@pytest.fixture
def runtime() -> WorkerRuntime:
    """Rank 0 of one, in epoch 3."""
    made = WorkerRuntime(Services())
    setup = RankConfig(0, 1, 0, 1, "g", 3, {})
    made.setup(setup.pack(pickle.dumps(encode({"": (Worker, (), {})}))), ())
    return made


def message(method: str, epoch: int) -> Message:
    return RankCall(epoch, "", method).pack()


@pytest.mark.parametrize("epoch", [3, ANY_EPOCH])
def test_a_call_of_its_epoch_and_one_that_names_none_run(runtime: WorkerRuntime, epoch: int) -> None:
    assert runtime.run(message("ping", epoch)) == 0


@pytest.mark.parametrize("epoch", [2, 4])
def test_a_call_of_another_epoch_is_refused(runtime: WorkerRuntime, epoch: int) -> None:
    with pytest.raises(RankFailure, match="epoch 3; make the call again") as raised:
        runtime.run(message("ping", epoch))
    assert raised.value.report.kind == "stale"


def test_what_a_rank_refused_is_a_stale_epoch_at_the_driver(runtime: WorkerRuntime) -> None:
    with pytest.raises(RankFailure) as raised:
        runtime.run(message("ping", 2))
    error = combine("g", "ping", [raised.value.report])
    assert isinstance(error, px.errors.StaleEpoch)
    assert (error.epoch, error.current) == (2, 3)


def test_questions_of_the_library_are_answered_by_a_rank_that_leaves(runtime: WorkerRuntime) -> None:
    handlers.leave(runtime)
    assert runtime.run(library_call(handlers.meet)) is None


def test_a_rank_that_stays_takes_the_calls_of_its_new_epoch(runtime: WorkerRuntime) -> None:
    runtime.epoch = 4
    assert runtime.run(message("ping", 4)) == 0
    with pytest.raises(RankFailure):
        runtime.run(message("ping", 3))


def test_an_async_method_runs_to_its_end(runtime: WorkerRuntime) -> None:
    assert runtime.run(message("wait", 3)) == "waited"


def test_ctrl_c_in_the_process_of_the_driver_ends_the_call_and_is_no_answer_to_it(
    runtime: WorkerRuntime,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        runtime.run(message("interrupt", 3))


def test_whatever_else_is_raised_is_an_answer(runtime: WorkerRuntime) -> None:
    with pytest.raises(RankFailure, match="GeneratorExit: gave up"):
        runtime.run(message("give_up", 3))


def test_a_traced_call_has_the_bytes_of_its_arguments_and_of_what_is_sent_back(tmp_path: Path) -> None:
    runtime = WorkerRuntime(Services())
    runtime.trace_files.files = str(tmp_path / "rank")
    runtime.instances[""] = SimpleNamespace(double=lambda value: np.zeros(1 << 20, np.uint8))

    sent = runtime.run_direct("", "double", (1,), {}, ("trace", 7, 512), encode)

    lines = Path(path_of(runtime.trace_files.files, "trace")).read_bytes().splitlines()
    part = read_log(lines, TrackKey("group", 0, 0)).parts[7]
    assert part.argument_bytes == 512
    assert part.result_bytes == sent.nbytes >= 1 << 20


def test_a_call_before_the_worker_is_made_says_so() -> None:
    with pytest.raises(DispatchError, match="in which the worker was not made"):
        WorkerRuntime(Services()).run_direct("", "double", (), {}, ("", 3, 0), encode)


def test_the_error_of_a_missing_module_says_where_ranks_look_for_modules() -> None:
    with (
        px.ResourcePool([1], use_gpu=False, backend="inline") as pool,
        px.WorkerGroup(pool, px.Worker) as group,
        pytest.raises(ModuleNotFoundError, match="PYTHONPATH"),
    ):
        group.run(lambda worker: __import__("nowhere_to_be_found"))
