"""vLLM as the inside of an engine, as far as it needs no vLLM: what its engine is told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.engines import Answer, Capabilities, SamplingParams, Vocabulary
from phalanx.engines.engine_requests import Row
from phalanx.engines.vllm import sampling_params as asking
from phalanx.engines.vllm import vllm_runner as machine
from phalanx.engines.vllm.async_vllm_runner import AsyncVllmRunner
from phalanx.engines.vllm.sleeping import SLEEP, orders
from phalanx.engines.vllm.tp_group import Leader
from phalanx.engines.vllm.vllm_runner import VllmRunner
from phalanx.engines.vllm.weight_segment import KeptWeights

VOCABULARY = Vocabulary(context=8, size=100)


@pytest.fixture(autouse=True)
def params(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of vLLM's ``SamplingParams``, which refuse some temperatures."""

    def made(**given: Any) -> dict[str, Any]:
        if given["temperature"] > 2:
            raise ValueError("temperature must be in [0, 2]")
        return given

    names = {"SamplingParams": made, "RequestOutputKind": SimpleNamespace(DELTA="delta")}
    monkeypatch.setattr(asking, "find", lambda name: names[name.rpartition(".")[2]])


def answer(key: int = 1, **sampling: Any) -> Answer:
    row = Row(0, "row", (5, 6), SamplingParams(**sampling))
    row.answers.append(Answer(row, key, 0, 3))
    return row.answers[0]


class FakeEngine:
    """Has requests, and gives each a token in a step."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
        self.engine_core = None
        self.slept: list[tuple[str, ...]] = []

    def add_request(self, key: str, prompt: Any, params: dict[str, Any]) -> None:
        if 66 in prompt["prompt_token_ids"]:
            raise ValueError("no such token")
        self.requests[key], self.prompts[key] = params, prompt["prompt_token_ids"]

    def abort_request(self, keys: list[str]) -> None:
        for key in keys:
            self.requests.pop(key, None)

    def step(self) -> list[Any]:
        outputs = [self._output(key) for key in self.requests]
        for key in [key for key in self.requests if key.startswith("prompt-")]:
            del self.requests[key]
        return outputs

    def _output(self, key: str) -> Any:
        prompt = self.prompts[key]
        allowed = self.requests[key].get("allowed_token_ids")
        told = [{token: SimpleNamespace(logprob=-2.0, rank=1)} for token in allowed or ()] or None
        drawn = SimpleNamespace(token_ids=[7], logprobs=told, finish_reason=None)
        each = [{token: SimpleNamespace(logprob=-1.0)} for token in prompt]
        return SimpleNamespace(request_id=key, outputs=[drawn], prompt_token_ids=prompt, prompt_logprobs=each)

    def collective_rpc(self, *_: Any, **__: Any) -> None:
        pass

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return reset_running_requests

    def sleep(self, level: int, mode: str) -> None:
        self.slept.append(SLEEP)

    def wake_up(self, tags: list[str]) -> None:
        self.slept.append(tuple(tags))


def machine_on(engine: FakeEngine) -> VllmRunner:
    return VllmRunner(engine, VOCABULARY, Capabilities(context=8), seeds=False)


def test_what_vllm_does_not_take_is_known_before_it_is_asked() -> None:
    made = machine_on(FakeEngine())

    assert "temperature must be in [0, 2]" in str(made.refuses(SamplingParams(temperature=3)))
    assert made.refuses(SamplingParams(temperature=2)) is None


def test_stop_tokens_that_there_are_not_and_long_seeds_are_no_matter_to_vllm() -> None:
    engine = FakeEngine()
    one = answer(stop=(4, -5, 1000), seed=1)
    one.seed = (1 << 64) + 3

    machine_on(engine).add([one])

    assert engine.requests["1"]["stop_token_ids"] == [4]
    assert engine.requests["1"]["extra_args"] == {"phalanx_seed": (3, 0, 0)}


def test_a_prompt_that_fills_the_context_has_a_log_probability_for_its_last_token_too() -> None:
    made = machine_on(FakeEngine())

    assert made.prompt_log_probs([[5, 6, 7], [1] * 8]) == [[-1.0, -1.0], [*[-1.0] * 6, -2.0]]


def test_an_aborted_answer_does_not_come_back_with_the_next_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "reload", None)
    engine, one = FakeEngine(), answer()
    made = machine_on(engine)
    made.add([one])
    made.prompt_log_probs([[5, 6]])  # in whose step the answer got a token that nobody has heard of

    made.remove([one])
    made.load([])

    assert not engine.requests and made.room() == 4


def test_ranks_that_follow_do_not_hear_of_what_their_leader_refuses() -> None:
    said: list[Any] = []
    leader = Leader(FakeEngine(), SimpleNamespace(say=lambda *told: said.extend(told)))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="no such token"):
        leader.add_request("1", {"prompt_token_ids": [66]}, {})
    leader.step()

    assert said == [("step", ())]


WEIGHTS, CACHE = ("weights",), ("kv_cache",)
BOTH = ("weights", "kv_cache")


@pytest.mark.parametrize(
    ("asleep", "wanted", "told"),
    [
        ((), BOTH, [SLEEP]),
        ((), CACHE, [SLEEP, WEIGHTS]),
        (CACHE, BOTH, [CACHE, SLEEP]),
        (BOTH, CACHE, [WEIGHTS]),
        (CACHE, (), [CACHE]),
        (BOTH, (), [BOTH]),
        (BOTH, BOTH, []),
    ],
)
def test_the_parts_that_are_to_sleep_do(asleep: Any, wanted: Any, told: Any) -> None:
    assert orders(asleep, wanted) == told


def test_an_engine_that_sleeps_in_part_is_woken_by_what_sleeps() -> None:
    engine = FakeEngine()
    made = machine_on(engine)

    made.sleep(["kv_cache"])
    made.wake(["weights", "kv_cache"])

    assert engine.slept == [SLEEP, WEIGHTS, CACHE]


class FakeCore:
    """Its loop runs when it is told to."""

    def __init__(self) -> None:
        self.llm = self
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
        self.errored = False
        self.started = 0
        self.refuses = False
        self._soon: list[Coroutine[Any, Any, object]] = []

    def soon(self, work: Coroutine[Any, Any, object]) -> None:
        self._soon.append(work)

    async def generate(self, *_: Any) -> Any:
        if self.refuses:
            raise ValueError("vLLM does not take this")
        self.started += 1
        await asyncio.Event().wait()
        yield

    async def turn(self) -> None:
        work, self._soon = self._soon, []
        for one in work:
            await one
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


def beside(core: FakeCore) -> AsyncVllmRunner:
    given: Any = core
    return AsyncVllmRunner(
        given, VOCABULARY, Capabilities(context=8), seeds=False, kept=KeptWeights(), coming=lambda: 1
    )


def test_an_answer_that_is_aborted_before_the_engine_beside_has_heard_of_it_is_not_made(
    core: FakeCore,
) -> None:
    async def run() -> int:
        made, one = beside(core), answer()
        made.add([one])
        made.remove([one])
        await core.turn()
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(run()) == 0
    assert core.started == 0


def test_an_engine_beside_that_refuses_a_request_can_be_used_on(core: FakeCore) -> None:
    async def run() -> int:
        core.refuses = True
        made = beside(core)
        made.add([answer()])
        await core.turn()
        with pytest.raises(ValueError, match="does not take this"):
            await made.step()
        core.refuses = False
        made.add([answer(2)])
        await core.turn()
        return core.started

    assert asyncio.run(run()) == 1
