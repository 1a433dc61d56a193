"""vLLM as a role: what it generates, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

import phalanx as px
from phalanx.engines import SamplingParams
from phalanx.engines.vllm import VllmRollout
from tests.engines.vllm.kinds import ONE_THREAD, SMALL
from tests.engines.vllm.models import Source

PROMPTS = [[5 + row, 6, 7 + 2 * row, 40 + row][: 2 + row % 3] for row in range(8)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class Roles(NamedTuple):
    """A source of weights, an engine, and what brings them over."""

    source: px.WorkerGroup
    rollout: px.WorkerGroup
    sync: px.WeightSync


@pytest.fixture(scope="module", params=[pytest.param("untied", marks=pytest.mark.soak), "tied", "tied Llama"])
def roles(request: pytest.FixtureRequest, cluster: None, models: dict[str, str]) -> Iterator[Roles]:
    folder = models[request.param]
    with px.ResourcePool([2], use_gpu=False) as pool:
        source = px.WorkerGroup(pool[0:1], Source.bind(folder), name="source", env=ONE_THREAD)
        bound = VllmRollout.bind(folder, tokenizer=models["words"], **SMALL)
        rollout = px.WorkerGroup(pool[1:2], bound, name="rollout", env=ONE_THREAD)
        yield Roles(source, rollout, px.WeightSync(source, rollout, "policy"))


def check_equal(roles: Roles) -> None:
    """Greedy tokens and their log-probabilities are those of transformers."""
    made = roles.rollout.generate(PROMPTS, GREEDY)
    tokens = [one.tokens for one in made]
    assert tokens == roles.source.greedy(PROMPTS, GREEDY.max_tokens)
    for one, expected in zip(made, roles.source.log_probs(PROMPTS, tokens), strict=True):
        assert one.log_probs == pytest.approx(expected, abs=1e-4)


def test_greedy_tokens_are_those_of_transformers_before_and_after_each_update(roles: Roles) -> None:
    check_equal(roles)
    for seed in range(3):
        roles.source.change(seed)
        version = roles.sync()
        check_equal(roles)
        assert roles.rollout.generate([[5]], GREEDY)[0].versions == ((version.number, 8),)


def test_weights_that_do_not_fit_are_refused_before_anything_is_touched(roles: Roles) -> None:
    before = roles.rollout.generate(PROMPTS, GREEDY)
    wrong = px.WeightSync(roles.source, roles.rollout, "policy", source_name="odd")
    layer = "model.layers.0.self_attn"

    for without, shapes in (
        ((), {"model.norm.weight": (7,)}),
        (("model.norm.weight",), {}),
        ((f"{layer}.k_proj.weight", f"{layer}.v_proj.weight"), {}),
    ):
        roles.source.send(without, shapes)
        with pytest.raises(px.weights.WeightsMismatch):
            wrong()

    assert [one.tokens for one in roles.rollout.generate(PROMPTS, GREEDY)] == [one.tokens for one in before]


def test_an_update_in_the_middle_of_16_answers_is_told_by_their_tokens(roles: Roles) -> None:
    prompts = [[5 + row, 6] for row in range(16)]
    before = px.weights.status(roles.rollout, "policy")[0].number or 0
    had = roles.rollout.engine_statistics()[0].tokens
    call = roles.rollout.generate.submit(
        prompts, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    )
    while roles.rollout.engine_statistics()[0].tokens < had + 160:
        pass
    roles.rollout.pause("keep")
    roles.source.change(11)
    version = roles.sync().number
    roles.rollout.resume()
    made = call.result()

    for one in made:
        assert [number for number, _ in one.versions] == [before, version]
        assert (sum(count for _, count in one.versions), one.finish_reason) == (100, "length")
    for prompt, one in list(zip(prompts, made, strict=True))[:3]:
        old = one.versions[0][1]
        (expected,) = roles.source.greedy([[*prompt, *one.tokens[:old]]], 100 - old)
        assert one.tokens[old:] == expected


def test_texts_go_in_and_come_out(roles: Roles) -> None:
    (tokens,) = roles.rollout.generate([[5, 6, 7]], GREEDY)
    words = [f"w{token}" for token in tokens.tokens]
    (text,) = roles.rollout.generate(["w5 w6 w7"], GREEDY)
    stop = f"{words[2]} {words[3]}"
    (stopped,) = roles.rollout.generate(["w5 w6 w7"], replace(GREEDY, stop=(stop,)))

    assert (text.tokens, text.text) == (tokens.tokens, " ".join(words))
    assert stopped.finish_reason == "stop"
    assert stop not in str(stopped.text)
