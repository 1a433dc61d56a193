"""An engine in processes of its own: served by HTTP, given other weights meanwhile, and gone with its group."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import phalanx as px
from phalanx.engines import Endpoint, SamplingParams
from phalanx.engines.vllm import AsyncVllmRollout
from phalanx.engines.vllm.vllm_imports import prepare
from tests.engines.vllm.conftest import (
    engine_processes,
    folders_of_sockets,
    shared_memory,
)
from tests.engines.vllm.kinds import ONE_THREAD, SMALL
from tests.engines.vllm.models import Source

PROMPTS = [[5 + row, 6, 7 + 2 * row, 40 + row][: 2 + row % 3] for row in range(8)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class Roles(NamedTuple):
    """A source of weights, an engine, and what brings them over."""

    source: px.WorkerGroup
    rollout: px.WorkerGroup
    sync: px.WeightSync


def start(pool: px.ResourcePool, folder: str, **options: Any) -> Roles:
    source = px.WorkerGroup(pool[0:1], Source.bind(folder), name="source", env=ONE_THREAD)
    bound = AsyncVllmRollout.bind(folder, **SMALL, **options)
    rollout = px.WorkerGroup(pool[1:2], bound, name="rollout", env=ONE_THREAD)
    return Roles(source, rollout, px.WeightSync(source, rollout, "policy"))


@pytest.fixture(scope="module")
def roles(cluster: None, models: dict[str, str]) -> Iterator[Roles]:
    with px.ResourcePool([2], use_gpu=False) as pool:
        yield start(pool, models["tied"], tokenizer=models["words"])


def ask(
    endpoint: Endpoint, prompt: list[int] | str, *, token: str | None = None, **given: Any
) -> dict[str, Any]:
    """A completion, by HTTP."""
    body = {"model": endpoint.model, "prompt": prompt, "temperature": 0, "return_token_ids": True, **given}
    headers = {"Authorization": f"Bearer {token or endpoint.token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]


def served(endpoint: Endpoint, prompt: list[int], count: int) -> tuple[int, ...]:
    """Its tokens."""
    return tuple(ask(endpoint, prompt, max_tokens=count, ignore_eos=True)["token_ids"])


def test_others_are_served_with_the_same_weights(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    for seed in range(2):
        roles.source.change(seed)
        roles.sync()
        expected = roles.source.greedy(PROMPTS[:2], 8)

        assert [served(endpoint, prompt, 8) for prompt in PROMPTS[:2]] == expected
        assert [one.tokens for one in roles.rollout.generate(PROMPTS[:2], GREEDY)] == expected


def test_texts_go_in_and_come_out(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    (tokens,) = roles.rollout.generate([[5, 6, 7]], GREEDY)
    (text,) = roles.rollout.generate(["w5 w6 w7"], GREEDY)
    answer = ask(endpoint, "w5 w6 w7", max_tokens=8, ignore_eos=True)

    assert text.text == " ".join(f"w{token}" for token in tokens.tokens)
    assert answer["text"].split() == str(text.text).split()


def test_nobody_is_served_without_the_token(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)

    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(endpoint, [5, 6], token="wrong")
    refused.value.close()
    assert refused.value.code == 401
    assert endpoint.token not in repr(endpoint)


def test_an_update_in_the_middle_of_16_answers_is_told_by_their_tokens(roles: Roles) -> None:
    prompts = [[5 + row, 6] for row in range(16)]
    before = roles.sync().number
    had = roles.rollout.engine_statistics()[0].tokens
    call = roles.rollout.generate.submit(
        prompts, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    )
    while roles.rollout.engine_statistics()[0].tokens < had + 160:
        pass
    roles.source.change(11)
    version = roles.sync().number
    made = call.result()

    for one in made:
        assert {number for number, _ in one.versions} <= {before, version}
        assert (sum(count for _, count in one.versions), one.finish_reason) == (100, "length")
    changed = [pair for pair in zip(prompts, made, strict=True) if len(pair[1].versions) == 2]
    for prompt, one in changed[:3]:
        old = one.versions[0][1]
        (expected,) = roles.source.greedy([[*prompt, *one.tokens[:old]]], 100 - old)
        assert one.tokens[old:] == expected


def test_an_engine_that_serves_nobody_says_so(roles: Roles) -> None:
    with pytest.raises(px.DeclarationError, match="no server"):
        px.engines.endpoints(roles.source)


def test_a_start_that_fails_leaves_nothing(cluster: None, models: dict[str, str]) -> None:
    """Neither where options are wrong, nor where the engine's own process finds out."""
    before = engine_processes(), shared_memory(), folders_of_sockets()
    wrong: dict[str, dict[str, Any]] = {
        "--no-such-thing": {"server_options": {"no_such_thing": 1}},
        "Engine core initialization failed": {"kv_cache_memory_bytes": 1},
    }
    with px.ResourcePool([1], use_gpu=False) as pool:
        for message, options in wrong.items():
            bound = AsyncVllmRollout.bind(models["untied"], **{**SMALL, **options})
            with pytest.raises(px.WorkerInitError, match=message):
                px.WorkerGroup(pool, bound, env=ONE_THREAD)

    assert engine_processes() <= before[0]
    assert shared_memory() <= before[1]
    assert folders_of_sockets() <= before[2]


def test_a_token_may_begin_with_a_dash() -> None:
    prepare()
    from phalanx.engines.vllm.endpoint import Server

    server = Server("model", "127.0.0.1", 0, "-token", {"root_path": "-path"})
    server.close()

    assert server._given.api_key == ["-token"]
    assert server._given.root_path == "-path"
