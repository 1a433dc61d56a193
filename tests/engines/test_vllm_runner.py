"""The runner of vLLM on a fake vLLM: the calls that its engine gets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

import phalanx as px
from phalanx.engines import Answer, Completion, SamplingParams, Vocabulary
from phalanx.engines.engine_requests import Row
from phalanx.engines.vllm import vllm_runner, vllm_sampling, vllm_weights
from phalanx.engines.vllm.vllm_runner import VllmRunner
from phalanx.engines.vllm.vllm_sampling import sampling_params
from phalanx.engines.vllm.vllm_weights import WorkerExtension
from phalanx.errors import PhalanxError
from phalanx.weights.shared_memory import allocate_tensors, location_of
from tests.engines.counting import CountingEngine

VOCABULARY = Vocabulary(context=8, end=frozenset({9}), size=100)


@pytest.fixture(autouse=True)
def params(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for vLLM's ``SamplingParams``, which refuse some temperatures."""

    def made(**given: Any) -> dict[str, Any]:
        if given["temperature"] > 2:
            raise ValueError("temperature must be in [0, 2]")
        return given

    names = {"SamplingParams": made, "RequestOutputKind": SimpleNamespace(DELTA="delta")}
    monkeypatch.setattr(vllm_sampling, "resolve_name", lambda name: names[name.rpartition(":")[2]])


def answer(key: int = 1, **sampling: Any) -> Answer:
    row = Row(0, "row", (5, 6), SamplingParams(**sampling), VOCABULARY)
    row.answers.append(Answer(row, key, 0, 3))
    return row.answers[0]


def test_impossible_stop_tokens_do_not_reach_vllm() -> None:
    one = answer(stop=(4, -5, 1000), seed=1)
    given = sampling_params(one, seeds=False)

    assert given["stop_token_ids"] == [4, 9]
    assert given["extra_args"] == {"phalanx_seed": (3, 0, 0)}
    endless = sampling_params(answer(stop=(4,), ignore_eos=True), seeds=False)
    assert endless["stop_token_ids"] == [4]
    assert given["ignore_eos"]  # vLLM ignores its own end tokens


class FakeLLM:
    """Stand-in for ``AsyncLLM`` that answers with token 7 and records other calls."""

    def __init__(self) -> None:
        model = SimpleNamespace(
            dtype=torch.float32,
            enable_sleep_mode=False,
            max_logprobs=5,
            max_model_len=8,
            hf_text_config=SimpleNamespace(eos_token_id=1),
            get_vocab_size=lambda: 100,
            try_get_generation_config=dict,
        )
        self.vllm_config = SimpleNamespace(
            model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=4)
        )
        self.errored, self.engine_core = False, self
        self.calls: list[str] = []
        self.running: list[str] = []
        self.refuses = self.loses_weights = False
        self.ends: list[Any] = []

    async def generate(self, prompt: Any, params: Any, key: str) -> Any:
        if self.refuses:
            raise ValueError("vLLM does not take this")
        self.running.append(key)
        try:
            for tokens, end in (([7], None), *(([], end) for end in self.ends)):
                output = SimpleNamespace(token_ids=tokens, logprobs=None, finish_reason=end)
                yield SimpleNamespace(outputs=[output])
            await asyncio.Event().wait()
        finally:
            self.running.remove(key)

    async def collective_rpc(self, method: str, args: Any = ()) -> None:
        if self.loses_weights:
            raise MemoryError("this worker is broken")
        self.calls.append(method)

    def __getattr__(self, name: str) -> Any:
        async def call(**_: Any) -> bool:
            self.calls.append(name)
            return True

        return call

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def shutdown(self, timeout: float | None = None) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def runner(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmRunner]:
    async def start(runner: VllmRunner, _: object) -> None:
        runner.llm = llm

    monkeypatch.setattr(VllmRunner, "_start", start)
    monkeypatch.setattr(vllm_runner, "_engine_arguments", lambda *_: None)
    monkeypatch.setattr(vllm_runner, "on_cpu", lambda: True)
    made = VllmRunner({}, None, None, seeds=False)
    yield made
    made.close()


def load(runner: VllmRunner) -> None:
    """Load weights as a sync does."""
    memory, tensors = allocate_tensors({"w": torch.ones(2)})
    runner.load(tensors.items(), 3)
    memory.close()


def tokens_of_step(
    runner: VllmRunner, begun: threading.Event | None = None
) -> list[tuple[int, int, int | None]]:
    """Return key, token and version of the tokens of the next step; ``begun`` is set once it waits."""

    async def step() -> Any:
        pending = asyncio.ensure_future(runner.step())
        await asyncio.sleep(0)
        if begun is not None:
            begun.set()
        return await asyncio.wait_for(pending, 10)

    return [(one.answer.key, one.token, one.version) for one in asyncio.run(step())]


def test_steps_return_tokens_with_their_weight_version_and_a_load_pauses_the_engine(
    runner: VllmRunner, llm: FakeLLM
) -> None:
    runner.add([answer(1)])
    assert tokens_of_step(runner) == [(1, 7, 0)]
    load(runner)
    runner.add([answer(2)])

    assert tokens_of_step(runner) == [(2, 7, 3)]
    assert runner.room() == 6
    update = ["pause_scheduler_async", "phalanx_load", "reset_prefix_cache", "version 3", "resume_generation"]
    assert llm.calls == update

    llm.calls.clear()
    runner.hold()
    runner.hold()
    load(runner)  # a held engine stays held
    assert llm.calls.count("pause_generation") == 1 and "resume_generation" not in llm.calls
    runner.release()
    assert llm.calls[-1] == "resume_generation"


def test_a_step_returns_the_tokens_of_all_answers_that_vllm_samples_together(runner: VllmRunner) -> None:
    samples = threading.Event()
    runner._loop.call_soon_threadsafe(samples.wait)
    runner.add([answer(1), answer(2)])

    assert tokens_of_step(runner, begun=samples) == [(1, 7, 0), (2, 7, 0)]


BOTH, PAUSE = ["weights", "kv_cache"], "pause_generation"


@pytest.mark.parametrize(
    ("orders", "calls"),
    [
        ([("sleep", BOTH), ("sleep", BOTH)], ["sleep"]),
        ([("sleep", ["kv_cache"])], ["sleep", "wake weights"]),
        ([("sleep", ["kv_cache"]), ("sleep", BOTH)], ["sleep", "wake weights", "wake kv_cache", "sleep"]),
        ([("sleep", BOTH), ("wake", ["weights"])], ["sleep", "wake weights"]),
        ([("sleep", BOTH), ("wake", BOTH), ("wake", BOTH)], ["sleep", "wake weights kv_cache"]),
        ([("sleep", BOTH), ("hold",), ("wake", BOTH)], ["sleep", PAUSE, "wake weights kv_cache", PAUSE]),
    ],
)
def test_only_the_requested_parts_of_an_engine_sleep(
    runner: VllmRunner, llm: FakeLLM, orders: Any, calls: Any
) -> None:
    for method, *tags in orders:
        getattr(runner, method)(*tags)

    assert [call for call in llm.calls if call != "reset_prefix_cache"] == calls


@pytest.mark.parametrize("is_running", [True, False])
def test_a_removed_answer_is_ended_in_vllm(runner: VllmRunner, llm: FakeLLM, is_running: bool) -> None:
    one, is_removed = answer(), threading.Event()
    if not is_running:
        runner._loop.call_soon_threadsafe(is_removed.wait)
    runner.add([one])
    assert not is_running or tokens_of_step(runner) == [(1, 7, 0)]
    runner.remove([one])
    is_removed.set()
    runner.wait(asyncio.sleep(0.01))

    assert llm.running == []
    assert runner.room() == 8


class Serving(px.engines.RolloutEngine):
    """An engine with the runner of the test."""

    def __init__(self, runner: VllmRunner) -> None:
        self.serve(runner)


def generated(runner: VllmRunner, **sampling: Any) -> Completion:
    call = Serving(runner).generate([[5, 6]], SamplingParams(log_probs=None, **sampling))
    return asyncio.run(asyncio.wait_for(call, 10))[0]


def test_a_refused_request_is_an_error_of_its_row_and_the_engine_works_unless_it_died(
    runner: VllmRunner, llm: FakeLLM
) -> None:
    llm.refuses = True
    wrong = generated(runner)
    llm.refuses = False

    assert (wrong.finish_reason, wrong.error) == ("error", "vLLM raised ValueError: vLLM does not take this")
    refused = generated(runner, temperature=3, n=2)
    assert [one.error for one in refused.all] == ["vLLM raised ValueError: temperature must be in [0, 2]"] * 2
    assert generated(runner, max_tokens=1).tokens == (7,)
    llm.refuses = llm.errored = True
    with pytest.raises(PhalanxError, match=r"since vLLM raised ValueError: .*group.restart\(\)"):
        generated(runner)


@pytest.mark.parametrize(
    ("end", "told"), [("abort", "abort"), ("error", "abort"), ("repetition", "abort"), ("length", "length")]
)
def test_an_answer_ends_when_vllm_ends_it_without_a_token(
    runner: VllmRunner, llm: FakeLLM, end: str, told: str
) -> None:
    llm.ends = [end]
    made = generated(runner, max_tokens=4)

    assert (made.tokens, made.finish_reason, made.error) == ((7,), told, None)


def test_a_failed_load_ends_the_pending_step_and_fails_later_steps(runner: VllmRunner, llm: FakeLLM) -> None:
    runner.add([answer()])
    tokens_of_step(runner)

    async def pending() -> Any:
        step = asyncio.ensure_future(runner.step())
        await asyncio.sleep(0)
        with pytest.raises(px.weights.WeightsError, match=r"this worker is broken; .*group.restart\(\)"):
            load(runner)
        return await asyncio.wait_for(step, 10)

    llm.loses_weights = True
    assert asyncio.run(pending()) == []  # the engine then finds that its weights are torn
    with pytest.raises(PhalanxError, match="cannot be used any more, since a load of weights failed"):
        tokens_of_step(runner)


def test_an_unlimited_number_of_likeliest_tokens_is_the_size_of_the_vocabulary(
    llm: FakeLLM, request: pytest.FixtureRequest
) -> None:
    llm.vllm_config.model_config.max_logprobs = -1

    assert request.getfixturevalue("runner").capabilities.top == 100


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_an_engine_with_several_accelerators_uses_processes_instead_of_actors(
    axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_runner, "resolve_name", lambda _: dict)
    monkeypatch.setattr(vllm_runner, "on_cpu", lambda: False)
    given = vllm_runner._engine_arguments({f"{axis}_parallel_size": 2})

    assert given["distributed_executor_backend"] == "mp"


def test_a_failed_start_ends_the_thread_of_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmRunner, "_start", AsyncMock(side_effect=ValueError("no such model")))
    monkeypatch.setattr(vllm_runner, "_engine_arguments", lambda *_: None)
    with pytest.raises(ValueError, match="no such model"):
        VllmRunner({}, None, None, seeds=False)
    assert "phalanx-vllm" not in [thread.name for thread in threading.enumerate()]


def test_a_worker_loads_tensors_from_a_location_and_refuses_a_parameter_without_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.randn(0)}
    loaded: dict[str, torch.Tensor] = {}

    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded.update((name, tensor.clone()) for name, tensor in pairs)
        return {*loaded}

    parameters = [("a", None), ("b", None)]
    model = SimpleNamespace(named_parameters=lambda: parameters, load_weights=load_weights)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)
    worker.vllm_config = None
    monkeypatch.setattr(vllm_weights, "resolve_name", lambda _: lambda *_: contextlib.nullcontext())
    memory, tensors = allocate_tensors(values)
    for name, value in values.items():
        tensors[name].copy_(value)
    worker.phalanx_load(location_of(tensors))

    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    parameters.append(("missing", None))
    with pytest.raises(px.weights.WeightsError, match="loaded nothing into 1 parameters: missing"):
        worker.phalanx_load(location_of(tensors))
    memory.close()


def test_engines_without_a_server_have_no_endpoints(here: px.ResourcePool) -> None:
    group = px.WorkerGroup(here, CountingEngine)
    with pytest.raises(px.DeclarationError, match="bind VllmRollout with serve=True"):
        px.engines.endpoints(group)
