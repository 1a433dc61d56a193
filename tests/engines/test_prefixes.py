"""Answers that continue from prefixes, and streams of tokens, on an engine that counts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.engines import Completion, SampledToken, SamplingParams, Tokens
from tests.engines.counting import CountingEngine


def generated(*args: Any, **kwargs: Any) -> list[Completion]:
    return asyncio.run(CountingEngine().generate(*args, **kwargs))


def streamed(*args: Any, **kwargs: Any) -> list[Tokens]:
    async def items() -> list[Tokens]:
        return [one async for one in CountingEngine().generate_tokens(*args, **kwargs)]

    return asyncio.run(items())


def aborted(*tokens: int, log_probs: tuple[float, ...] = ()) -> Completion:
    return Completion(tokens, log_probs, "abort", ((0, len(tokens)),))


@pytest.mark.parametrize("prefix", [[21, 1000], aborted(21, 1000), [-1]])
def test_an_unknown_token_in_a_prefix_is_an_error_of_its_row(prefix: Any) -> None:
    wrong, right = generated([[20], [20]], SamplingParams(max_tokens=3), prefix=[prefix, None])

    assert wrong.finish_reason == "error" and "its prefix has the token" in str(wrong.error)
    assert right.tokens == (21, 22, 23)


@pytest.mark.parametrize("prefix", [torch.tensor([21]), np.array([21]), [np.int64(21)], (21,)])
def test_prompts_and_prefixes_can_be_any_sequence_of_integers(prefix: Any) -> None:
    of_prefix, of_prompt = generated([[20], prefix], SamplingParams(max_tokens=2), prefix=[prefix, None])

    assert (of_prefix.tokens, of_prompt.tokens) == ((21, 22), (22, 23))
    assert type(of_prefix.tokens[0]) is int


@pytest.mark.parametrize("prefix", ["21", 21, [2.5]])
def test_a_prefix_of_another_type_is_refused_with_the_expected_types(prefix: Any) -> None:
    with pytest.raises(ValueError, match="expected a Completion, its tokens, or None"):
        generated([[20]], prefix=[prefix])


def test_tokens_of_a_prefix_without_log_probabilities_have_nan() -> None:
    unknown, unwanted, likeliest = generated(
        [[20]] * 3,
        [
            SamplingParams(max_tokens=4),
            SamplingParams(max_tokens=4, log_probs=None),
            SamplingParams(max_tokens=4),
        ],
        prefix=[aborted(21, 22), aborted(21, 22, log_probs=(-1.0, -2.0)), aborted(21, 22, log_probs=(-1.0,))],
    )

    assert [math.isnan(one) for one in unknown.log_probs] == [True, True, False, False]
    assert unwanted.log_probs == ()
    assert [math.isnan(one) for one in likeliest.log_probs] == [False, True, False, False]


def test_a_stream_reports_the_end_of_answers_that_need_no_more_tokens() -> None:
    full = streamed([[20]], SamplingParams(max_tokens=2), prefix=[[21, 22]])
    done = Completion((9,), (-1.0,), "stop", ((0, 1),), more=(aborted(21),))
    half = streamed([[20]], SamplingParams(max_tokens=2, n=2), prefix=[done])

    assert [(one.tokens, one.finish_reason) for one in full] == [((), "length")]
    assert sorted((one.sample, one.tokens, str(one.finish_reason)) for one in half) == [
        (0, (), "stop"),
        (1, (22,), "length"),
    ]


def test_streamed_tokens_of_a_step_are_split_by_weight_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = CountingEngine()

    def step() -> list[SampledToken]:
        (one,) = engine.machine.answers.values()
        return [
            SampledToken(one, 21, -1.0, version=1),
            SampledToken(one, 22, -1.0, version=1),
            SampledToken(one, 23, -1.0, version=2),
        ]

    monkeypatch.setattr(engine.machine, "step", step)

    async def items() -> list[Tokens]:
        return [one async for one in engine.generate_tokens([[20]], SamplingParams(max_tokens=3))]

    assert [(one.tokens, one.version, one.finish_reason) for one in asyncio.run(items())] == [
        ((21, 22), 1, None),
        ((23,), 2, "length"),
    ]


def test_a_long_answer_is_not_decoded_completely_for_each_token() -> None:
    engine, told = CountingEngine(), list[int]()

    def text(tokens: Sequence[int]) -> str:
        told.append(len(tokens))
        return "".join(f"{token} " for token in tokens)

    engine.machine.vocabulary = replace(engine.machine.vocabulary, context=2000, size=2000, text=text)
    (made,) = asyncio.run(engine.generate([[20]], SamplingParams(max_tokens=1500, stop=("1019 1020 ",))))

    assert made.finish_reason == "stop" and str(made.text).endswith(" 1017 1018 ")
    assert sorted(told)[-1] == 1000 and sum(told) < 100 * 1000


def test_a_pause_with_wait_after_a_pause_with_keep_finishes_running_answers() -> None:
    async def paused() -> list[Completion]:
        engine = CountingEngine()
        call = asyncio.create_task(engine.generate([[20]], SamplingParams(max_tokens=6)))
        while not engine.machine.answers:
            await asyncio.sleep(0)
        await engine.pause("keep")
        await asyncio.wait_for(engine.pause("wait"), 10)
        assert engine.machine.held
        return await call

    assert len(asyncio.run(paused())[0].tokens) == 6


class Unserved(px.engines.RolloutEngine):
    pass


def test_an_engine_without_a_runner_is_refused_with_advice() -> None:
    with (
        px.ResourcePool([1], backend="inline") as pool,
        pytest.raises(px.WorkerInitError, match=r"call self.serve\(runner\) in its constructor"),
    ):
        px.WorkerGroup(pool, Unserved)
