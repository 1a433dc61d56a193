"""Behavior that all engines share, on an engine that counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.engines import Completion, SampledToken, SamplingParams, Tokens
from phalanx.engines.engine import TokenRate
from phalanx.testing.clock import FakeClock
from tests.engines.counting import CONTEXT, CountingEngine

ONE, SIX = SamplingParams(max_tokens=1), SamplingParams(max_tokens=6)


async def until(engine: CountingEngine, tokens: int) -> None:
    """Let the engine continue until an answer has ``tokens`` tokens."""
    while not any(len(answer.tokens) >= tokens for answer in engine.machine.answers.values()):
        await asyncio.sleep(0)


def generated(*args: Any, engine: CountingEngine | None = None, **kwargs: Any) -> list[Completion]:
    return asyncio.run((engine or CountingEngine()).generate(*args, **kwargs))


def streamed(*args: Any, engine: CountingEngine | None = None, **kwargs: Any) -> list[Tokens]:
    async def items() -> list[Tokens]:
        return [one async for one in (engine or CountingEngine()).generate_tokens(*args, **kwargs)]

    return asyncio.run(items())


def aborted(*tokens: int, log_probs: tuple[float, ...] = ()) -> Completion:
    return Completion(tokens, log_probs, "abort", ((0, len(tokens)),))


PREFIX_TYPES = "expected a Completion, its tokens, or None"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": {"max_tokens": 4}}, r"expected px.engines.SamplingParams\(max_tokens="),
        ({"sampling": [{"max_tokens": 4}]}, r"expected px.engines.SamplingParams\(max_tokens="),
        ({"sampling": None}, r"expected px.engines.SamplingParams\(max_tokens="),
        ({"prompts": "a text"}, "prompts is a str; give"),
        ({"prompts": None}, "prompts is a NoneType; give"),
        ({"prompts": {"input_ids": [[10]]}}, "prompts is a dict; give"),
        ({"ids": "a"}, "ids is .*; expected a list"),
        ({"prefix": aborted(7)}, "prefix is .*; expected a list"),
        ({"prefix": ["21"]}, PREFIX_TYPES),
        ({"prefix": [21]}, PREFIX_TYPES),
        ({"prefix": [[2.5]]}, PREFIX_TYPES),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_with_the_expected_type(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generated(**{"prompts": [[10]], **arguments})


@pytest.mark.parametrize(
    ("prompt", "prefix", "message"),
    [
        ([], None, "empty"),
        ([1] * CONTEXT, None, "room for only 31"),
        ([100], None, "its prompt has the token 100"),
        ([20], [21, 22], "longer than max_tokens=1"),
        ([20], [-1], "its prefix has the token -1"),
        ([20], aborted(1000), "its prefix has the token 1000"),
    ],
)
def test_an_invalid_prompt_or_prefix_is_an_error_of_its_row_alone(
    prompt: Any, prefix: Any, message: str
) -> None:
    wrong, right = generated([prompt, [20]], replace(ONE, n=2), prefix=[prefix, None])

    assert {(one.finish_reason, message in str(one.error)) for one in wrong.all} == {("error", True)}
    assert right.tokens == (21,)


@pytest.mark.parametrize("prefix", [torch.tensor([21]), np.array([21]), [np.int64(21)], (21,)])
def test_prompts_and_prefixes_can_be_any_sequence_of_integers(prefix: Any) -> None:
    of_prefix, of_prompt = generated([[20], prefix], SamplingParams(max_tokens=2), prefix=[prefix, None])

    assert (of_prefix.tokens, of_prompt.tokens) == ((21, 22), (22, 23))
    assert type(of_prefix.tokens[0]) is int


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (SamplingParams(max_tokens=9), (7, 8, 9)),
        (SamplingParams(max_tokens=4, ignore_eos=True), (7, 8, 9, 10)),
        (SamplingParams(max_tokens=np.int64(9), stop=(np.int64(8),)), (7, 8)),
    ],
)
def test_an_answer_ends_with_its_end_token_or_stop_token(
    sampling: SamplingParams, tokens: tuple[int, ...]
) -> None:
    assert generated([[6]], sampling)[0].tokens == tokens


def test_the_first_stop_text_ends_an_answer_unless_it_is_in_the_prefix() -> None:
    engine = CountingEngine()
    engine.machine.vocabulary = replace(
        engine.machine.vocabulary, text=lambda tokens: "".join(chr(97 + token) for token in tokens)
    )
    stop = SamplingParams(max_tokens=40, stop=("a", "d"))

    (cut,) = generated([[0]], SamplingParams(max_tokens=40, stop=("d", "c")), engine=engine)
    (answer,) = generated([[6]], stop, prefix=[[0] + [1] * 19], engine=engine)

    assert cut.text == "b"
    assert answer.text == "a" + "b" * 19 + "c"


def test_a_long_answer_is_not_decoded_completely_for_each_token() -> None:
    engine, told = CountingEngine(), list[int]()

    def text(tokens: Sequence[int]) -> str:
        told.append(len(tokens))
        return "".join(f"{token} " for token in tokens)

    engine.machine.vocabulary = replace(engine.machine.vocabulary, context=2000, size=2000, text=text)
    (made,) = generated([[20]], SamplingParams(max_tokens=1500, stop=("1019 1020 ",)), engine=engine)

    assert made.finish_reason == "stop" and str(made.text).endswith(" 1017 1018 ")
    assert sorted(told)[-1] == 1000 and sum(told) < 100 * 1000


def test_tokens_of_a_prefix_without_log_probabilities_have_nan() -> None:
    four, known = SamplingParams(max_tokens=4), aborted(21, 22, log_probs=(-1.0, -2.0))
    unknown, unwanted, partly = generated(
        [[20]] * 3,
        [four, replace(four, log_probs=None), four],
        prefix=[aborted(21, 22), known, replace(known, log_probs=(-1.0,))],
    )

    assert [math.isnan(one) for one in unknown.log_probs] == [True, True, False, False]
    assert unwanted.log_probs == ()
    assert [math.isnan(one) for one in partly.log_probs] == [False, True, False, False]


def test_a_finished_prefix_is_returned_and_a_stream_reports_the_end_of_complete_answers() -> None:
    two = SamplingParams(max_tokens=2)
    done = Completion((9,), (-1.0,), "stop", ((0, 1),))
    full = streamed([[20]], two, prefix=[[21, 22]])
    half = streamed([[20]], replace(two, n=2), prefix=[replace(done, more=(aborted(21),))])

    assert generated([[20]], prefix=[done]) == [done]
    assert [(one.tokens, one.finish_reason) for one in full] == [((), "length")]
    assert sorted((one.sample, one.tokens, str(one.finish_reason)) for one in half) == [
        (0, (), "stop"),
        (1, (22,), "length"),
    ]


def test_streamed_tokens_of_a_step_are_split_by_weight_version(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CountingEngine()

    def step() -> list[SampledToken]:
        (one,) = engine.machine.answers.values()
        versions = {21: 1, 22: 1, 23: 2}
        return [SampledToken(one, token, -1.0, version=version) for token, version in versions.items()]

    monkeypatch.setattr(engine.machine, "step", step)
    items = streamed([[20]], SamplingParams(max_tokens=3), engine=engine)

    assert [(one.tokens, one.version, one.finish_reason) for one in items] == [
        ((21, 22), 1, None),
        ((23,), 2, "length"),
    ]


def test_answers_wait_for_capacity_of_the_engine_and_end_when_the_context_is_full() -> None:
    made = generated([[10], [20], [30]], SamplingParams(max_tokens=2), engine=CountingEngine(room=1))
    (full,) = generated([[20] * (CONTEXT - 2)], SamplingParams(max_tokens=9))

    assert [one.tokens for one in made] == [(11, 12), (21, 22), (31, 32)]
    assert (len(full.tokens), full.finish_reason) == (2, "length")


@pytest.mark.parametrize("ids", [None, "mine", ["mine", "unknown"], "a close"])
def test_an_answer_continues_after_an_abort_or_a_close(ids: list[str] | str | None) -> None:
    alone = ids in (None, "a close")

    async def interrupted() -> tuple[Completion, Completion, Completion]:
        engine = CountingEngine(room=1 if alone else None)
        call = asyncio.create_task(engine.generate([[20], [30]], SIX, ids=["mine", "other"]))
        await until(engine, 2)
        if ids == "a close":
            engine.close()
            engine = CountingEngine()
        else:
            assert await engine.abort(ids) == (2 if ids is None else 1)
        part, other = await call
        (whole,) = await engine.generate([[20]], SIX, prefix=[part])
        return part, other, whole

    part, other, whole = asyncio.run(interrupted())

    assert part.finish_reason == "abort" and not part.finished and 2 <= len(part.tokens) < 6
    assert other.tokens == (() if alone else (31, 32, 33, 34, 35, 36))
    assert whole.tokens == (21, 22, 23, 24, 25, 26) and len(whole.log_probs) == 6


def test_a_pause_with_keep_stops_between_two_steps_and_a_later_wait_finishes_running_answers() -> None:
    async def paused() -> tuple[int, tuple[int, ...]]:
        engine = CountingEngine()
        call = asyncio.create_task(engine.generate([[20]], SIX))
        await until(engine, 2)
        await engine.pause("keep")
        (answer,) = engine.machine.answers.values()
        for _ in range(10):
            await asyncio.sleep(0)
        tokens = len(answer.tokens)
        await asyncio.wait_for(engine.pause("wait"), 10)
        assert engine.machine.held
        return tokens, (await call)[0].tokens

    assert asyncio.run(paused()) == (2, (21, 22, 23, 24, 25, 26))


def test_a_pause_with_wait_returns_after_running_answers_and_starts_no_others() -> None:
    async def paused() -> tuple[bool, bool]:
        engine = CountingEngine()
        running = asyncio.create_task(engine.generate([[20]], SIX))
        await until(engine, 1)
        pause = asyncio.create_task(engine.pause("wait"))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate([[20]], ONE))
        await pause
        await asyncio.sleep(0)
        found = running.done(), late.done()
        await engine.resume()
        await late
        return found

    assert asyncio.run(paused()) == (True, False)


@pytest.mark.parametrize("fails", ["step", "remove"])
def test_an_error_of_the_runner_fails_all_running_calls_but_no_later_call(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    async def made() -> list[object]:
        calls = [engine.generate([[20]], SamplingParams(max_tokens=count)) for count in (1, 9)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    engine = CountingEngine()
    with monkeypatch.context() as patch:
        patch.setattr(engine.machine, fails, Mock(side_effect=ArithmeticError("the kernel is broken")))
        errors = asyncio.run(made())
        engine.machine.answers.clear()

    assert [str(error) for error in errors] == ["the kernel is broken"] * 2
    assert generated([[20]], ONE, engine=engine)[0].tokens == (21,)


def test_a_cancelled_call_leaves_no_answer_in_the_engine() -> None:
    async def cancelled() -> int:
        engine = CountingEngine()
        call = asyncio.create_task(engine.generate([[20]], SIX))
        await until(engine, 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return len(engine.machine.answers)

    assert asyncio.run(cancelled()) == 0


def test_unsupported_sleep_warns_once_and_the_engine_still_generates() -> None:
    engine = CountingEngine()
    with pytest.warns(UserWarning, match="does nothing") as warned:
        assert [asyncio.run(engine.sleep()) for _ in range(2)] == [None, None]

    assert len(warned) == 1 and generated([[20]], ONE, engine=engine)[0].tokens == (21,)


def test_each_row_has_its_own_seed_of_64_bits_and_its_own_id_and_stop_none_is_empty() -> None:
    engine = CountingEngine()
    made = generated([[1]] * 2, SamplingParams(max_tokens=1, seed=2**64 + 3).each(2), engine=engine)

    assert engine.machine.seeds == [3, 4]
    assert len({one.id for one in (*made, *generated([[1]]))}) == 3
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


def test_the_token_rate_counts_only_time_at_work_in_the_last_ten_seconds() -> None:
    clock = FakeClock(100.0)
    rate = TokenRate(clock.now)

    def work(idle: float, *steps: tuple[float, int]) -> float:
        clock.advance(idle)
        rate.start()
        for seconds, tokens in steps:
            clock.advance(seconds)
            rate.add(tokens)
        return rate.per_second()

    assert [work(0.9, (0.1, 20), (0.3, 20)) for _ in range(3)] == pytest.approx([100] * 3)
    assert work(9.5, (1.0, 10)) == pytest.approx(10)
    clock.advance(10.1)
    assert rate.per_second() == 0


@pytest.mark.parametrize("size", [1, 2])
def test_restored_engines_of_any_number_repeat_the_seeds_of_their_rows(tmp_path: Path, size: int) -> None:
    with px.ResourcePool([2], backend="inline") as pool:
        group = px.WorkerGroup(pool, CountingEngine)
        px.resize(group, size)
        px.save(group, tmp_path)
        group[0].generate([[10], [20]], ONE)
        px.resize(group, 3 - size)
        px.load(group, tmp_path)
        group.generate([[10]] * 4, ONE)
        seeds = group.run(lambda worker: worker.machine.seeds)

    first, second, *again = seeds[0]
    assert again[:2] == [first, second] and len({seed for rank in seeds for seed in rank}) == 4


def test_an_engine_reports_a_line_and_metrics() -> None:
    lines, numbers = list[str](), dict[str, dict[str, float]]()

    async def run() -> None:
        engine = CountingEngine()
        engine._context.tell = lines.append
        engine._context.measure = lambda what, rank, values: numbers.update({f"{what} {rank}": dict(values)})
        await engine.generate([[10], [20]], SamplingParams(max_tokens=3))

    asyncio.run(run())

    ((name, values),) = numbers.items()
    assert name.startswith("engine ")
    assert (values["tokens"], values["running"]) == (6.0, 0.0)
    assert lines[-1].endswith("0 running, 0 waiting, cache 0%, 2 rows done")


def test_an_engine_without_a_runner_is_refused_with_advice(here: px.ResourcePool) -> None:
    with pytest.raises(px.WorkerInitError, match=r"call self.serve\(runner\) in its constructor"):
        px.WorkerGroup(here, px.engines.RolloutEngine)


def test_ranks_that_join_or_restart_are_paused_if_the_group_is() -> None:
    with px.ResourcePool([2], backend="inline") as pool:
        group = px.WorkerGroup(pool, CountingEngine)
        for change, mode in ((lambda: group.pause("wait"), "wait"), (group.resume, None)):
            px.resize(group, 1)
            change()
            px.resize(group, 2)
            assert [one.paused for one in group.engine_statistics()] == [mode] * 2
            group.restart()
            assert [one.paused for one in group.engine_statistics()] == [mode] * 2


SLOW_ON_RAY = True


def test_a_call_of_a_paused_engine_waits_until_it_resumes_or_leaves_and_raises_inline(
    pool: px.ResourcePool, backend: str
) -> None:
    group = px.WorkerGroup(pool[0:2], CountingEngine)
    if backend == "inline":
        with group.any.generate_tokens.stream([[10]], SIX, buffer=1) as items:
            assert next(items).tokens == (11,)
            group.pause("keep")
            with pytest.raises(RuntimeError, match="resume"):
                list(items)
    else:
        group.pause("keep")
        call = group.generate.submit([[10], [20]], ONE)
        px.resize(group, 1, timeout=30)
        group.resume()
        assert [one.tokens for one in call.result()] == [(11,), (21,)]
    group.close()


def test_a_trace_has_counters_of_each_engine(pool: px.ResourcePool) -> None:
    with px.trace() as trace:
        group = px.WorkerGroup(pool, CountingEngine)
        group.generate([[10], [20], [30], [40]], SamplingParams(max_tokens=3))
    found = {counter.name: counter for counter in trace.events.counters}

    assert sorted(found) == [f"engine of {group.name} rank {rank}" for rank in range(group.world_size)]
    assert sum(counter.values["tokens"][-1] for counter in found.values()) == 12
