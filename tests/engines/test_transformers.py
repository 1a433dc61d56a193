"""``TransformersRollout`` on a small Llama: the conformance suite of engines, and its own behavior."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

import phalanx as px
from phalanx.engines import ModelRunner, SamplingParams
from phalanx.engines.transformers import TransformersRollout
from tests.conformance.engines import PROMPTS, EngineConformance, Reference, Source

SOAK_ON_RAY = True
THREADS = {"OMP_NUM_THREADS": "1"}


def small_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.4,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


class TestPadded(EngineConformance):
    @pytest.fixture(scope="class")
    def model(self) -> LlamaForCausalLM:
        return small_llama()

    @pytest.fixture(scope="class")
    def rollout(self, backend: str) -> Iterator[Any]:
        with px.ResourcePool([2], use_gpu=False) as pool:
            yield px.WorkerGroup(
                pool, TransformersRollout.bind(small_llama, weights="policy", seed=0), env=THREADS
            )


class Numbers:
    """A tokenizer whose texts are numbers with a blank after each."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"{token} " for token in tokens)


def rollout_here(**given: Any) -> TransformersRollout:
    return TransformersRollout(small_llama(), seed=0, **given)


def test_prompts_answers_and_stops_can_be_texts_if_the_engine_has_a_tokenizer() -> None:
    engine = rollout_here(tokenizer=Numbers())
    (whole,) = asyncio.run(engine.generate(["4 5 6"], SamplingParams(max_tokens=6, temperature=0)))
    words = str(whole.text).split()

    stop = SamplingParams(max_tokens=6, temperature=0, stop=(f" {words[2]} ",))
    (made,) = asyncio.run(engine.generate(["4 5 6"], stop))

    assert words == [str(token) for token in whole.tokens]
    assert made.text == " ".join(words[:2]) and made.finish_reason == "stop"
    with pytest.raises(ValueError, match="tokenizer"):
        asyncio.run(rollout_here().generate(["4 5 6"]))


def test_answers_that_start_later_have_the_tokens_of_their_seeds_and_a_batch_does_not_grow() -> None:
    prompts, samplings = [[5, 6, 7], [8, 9], [10]] * 4, SamplingParams(max_tokens=9, seed=1).each(12)

    async def one_after_another() -> tuple[int, list[tuple[int, ...]]]:
        engine, calls = rollout_here(), list[asyncio.Task[Any]]()
        for prompt, sampling in zip(prompts, samplings, strict=True):
            calls.append(asyncio.create_task(engine.generate([prompt], [sampling])))
            for _ in range(6):  # each answer starts before the previous answer ends
                await asyncio.sleep(0)
        places = engine._runner._mask.shape[1]  # type: ignore[attr-defined]
        return places, [(await call)[0].tokens for call in calls]

    together = asyncio.run(rollout_here().generate(prompts, samplings))
    places, answers = asyncio.run(one_after_another())

    assert answers == [one.tokens for one in together]
    assert places <= 3 + 9


class WithoutPositions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_llama()
        self.config = self.inner.config

    def forward(self, input_ids: Any, attention_mask: Any, past_key_values: Any, use_cache: bool) -> Any:
        return self.inner(input_ids, attention_mask, past_key_values=past_key_values, use_cache=use_cache)


def test_a_model_without_position_ids_generates_equal_tokens_next_to_a_longer_prompt() -> None:
    short, long = ([5, 7, 9], 20), (list(range(1, 40)), 3)

    def tokens(*rows: tuple[list[int], int]) -> tuple[int, ...]:
        engine = TransformersRollout(WithoutPositions(), seed=0)
        sampling = [SamplingParams(max_tokens=count, temperature=0) for _, count in rows]
        return asyncio.run(engine.generate([prompt for prompt, _ in rows], sampling))[0].tokens

    assert tokens(short, long) == tokens(short)


def test_answers_of_a_model_with_convolutions_do_not_depend_on_other_rows() -> None:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = Lfm2ForCausalLM(Lfm2Config(**size, **heads, layer_types=["conv", "full_attention"]))
    prompts, engine = [[5, 6, 7], [8], [3, 4, 5, 6]], TransformersRollout(model, seed=0)
    sampling = [SamplingParams(max_tokens=count, temperature=0) for count in (9, 2, 5)]

    together = asyncio.run(engine.generate(prompts, sampling))

    assert engine._runner.room() == 256  # type: ignore[attr-defined]  # no ended answer is left
    alone = [
        asyncio.run(engine.generate([one], [how]))[0] for one, how in zip(prompts, sampling, strict=True)
    ]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


@pytest.mark.parametrize("top_p", [0.05, 1.0])
def test_the_likeliest_tokens_are_returned_and_a_small_top_p_samples_no_others(top_p: float) -> None:
    sampling = SamplingParams(max_tokens=5, top_p=top_p, log_probs=3, seed=2)

    (made,) = asyncio.run(rollout_here().generate([[5, 6, 7]], sampling))

    assert [len(top) for top in made.top] == [3] * 5
    first = [max(top, key=lambda token: top[token]) for top in made.top]
    assert (list(made.tokens) == first) == (top_p < 1)


def test_impossible_limits_and_a_missing_model_folder_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a number from 1"):
        rollout_here(max_running=0)
    with pytest.raises(ValueError, match="expected 1 to 64"):
        rollout_here(context=65)
    model = small_llama()  # its positions would depend on the longest row of a batch
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    with pytest.raises(ValueError, match="expected 1 to 16"):
        TransformersRollout(model, context=17)
    for folder in ("/no/such/model", "./no-such-model"):
        with pytest.raises(ValueError, match=f"model='{folder}': there is no such folder"):
            TransformersRollout(folder)
    runner = SimpleNamespace(capabilities=SimpleNamespace(top=5))
    refused = ModelRunner.refuses(runner, SamplingParams(log_probs=6))  # type: ignore[arg-type]
    assert refused == "SamplingParams(log_probs=6): this engine returns at most the 5 likeliest tokens"


@pytest.mark.parametrize("model", [small_llama, partial(small_llama, tied=True)], ids=["untied", "tied"])
def test_engines_added_by_a_resize_have_the_weights_of_the_last_sync(backend: str, model: Any) -> None:
    with px.ResourcePool([1], use_gpu=False) as one, px.ResourcePool([2], use_gpu=False) as two:
        source = px.WorkerGroup(one, Source.bind(model()))
        rollout = px.WorkerGroup(two, TransformersRollout.bind(model, weights="policy"), env=THREADS)
        reference = Reference(model())
        px.resize(rollout, 1)
        with px.WeightSync(source, rollout, "policy") as sync:
            (state,) = source.change(3)
            reference.model.load_state_dict(state)
            sync()
            px.resize(rollout, 2)

            made = rollout.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0))

    assert [one.tokens for one in made] == [reference.generate(prompt, 8) for prompt in PROMPTS]
    assert len({version for one in made for version in one.versions}) == 1
