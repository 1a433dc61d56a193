"""An engine in processes of its own: served by HTTP, given other weights meanwhile, and gone with its group."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlparse

import pytest

import phalanx as px
from phalanx.engines import Endpoint, SamplingParams
from phalanx.engines.vllm import AsyncVllmRollout
from phalanx.engines.vllm.vllm_imports import prepare
from tests.engines.vllm.conftest import (
    engine_processes,
    folders_of_sockets,
    route_paths,
    shared_memory,
)
from tests.engines.vllm.kinds import ONE_THREAD, SMALL
from tests.engines.vllm.models import Source

PROMPTS = [[5 + row, 6, 7 + 2 * row, 40 + row][: 2 + row % 3] for row in range(8)]
WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
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


def ask(endpoint: Endpoint, prompt: list[int] | str, **given: Any) -> dict[str, Any]:
    """A completion, by HTTP."""
    body = {"model": endpoint.model, "prompt": prompt, "temperature": 0, "return_token_ids": True, **given}
    headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/json"}
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


def routes(worker: Any) -> set[str]:
    """Return the paths that the server of this rank has."""
    return route_paths(worker._server._server.config.app.app)


def status(endpoint: Endpoint, path: str, method: str, headers: dict[str, str]) -> int:
    """Return the status of a response, to an address of the server."""
    place = urlparse(endpoint.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        connection.request(method, path, body="{}" if method == "POST" else None, headers=headers)
        response = connection.getresponse()
        challenge = response.getheader("www-authenticate")
        assert (challenge == "Bearer") is (response.status == 401)
        return response.status
    finally:
        connection.close()


def test_no_route_is_served_without_the_key(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    (paths,) = roles.rollout.run(routes)
    wrong = {"Authorization": f"Bearer {endpoint.token[:-1]}", "Content-Type": "application/json"}
    for path in (*paths, "/no/such/route"):
        for method in ("GET", "HEAD", "OPTIONS", "POST"):
            for headers in ({}, wrong):
                assert (status(endpoint, path, method, headers), method, path) == (401, method, path)
        assert (status(endpoint, path, "GET", WEBSOCKET), path) == (401, path)
    assert {"/health", "/metrics", "/invocations", "/tokenize", "/v1/completions"} <= paths
    assert endpoint.token not in repr(endpoint)


def test_the_key_opens_routes_at_the_loopback(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    right = {"Authorization": f"Bearer {endpoint.token}"}

    assert urlparse(endpoint.url).hostname == "127.0.0.1"
    assert status(endpoint, "/health", "GET", right) == 200
    assert status(endpoint, "/metrics", "GET", right) == 200
    assert status(endpoint, "/v1/models", "GET", right) == 200


def test_there_are_no_routes_for_development(roles: Roles) -> None:
    (paths,) = roles.rollout.run(routes)
    (endpoint,) = px.engines.endpoints(roles.rollout)
    removed = {"/pause", "/resume", "/update_weights", "/collective_rpc", "/sleep", "/reset_prefix_cache"}

    assert not removed & paths
    for path in removed:
        assert status(endpoint, path, "POST", {"Authorization": f"Bearer {endpoint.token}"}) == 404


def test_the_client_of_openai_needs_the_key(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    openai = pytest.importorskip("openai")  # comes with vLLM
    prompt = {
        "model": endpoint.model,
        "prompt": "w5 w6 w7",
        "max_tokens": 4,
        "extra_body": {"ignore_eos": True},
    }

    with openai.OpenAI(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as client:
        assert client.completions.create(**prompt).usage.completion_tokens == 4
    with (
        openai.OpenAI(base_url=endpoint.url, api_key="another-key-of-a-client", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="missing or wrong key"),
    ):
        client.completions.create(**prompt)


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
        "VLLM_SERVER_DEV_MODE is '1'": {"env": {"VLLM_SERVER_DEV_MODE": "1"}},
        "Engine core initialization failed": {"kv_cache_memory_bytes": 1},
    }
    with px.ResourcePool([1], use_gpu=False) as pool:
        for message, options in wrong.items():
            env = {**ONE_THREAD, **options.pop("env", {})}
            bound = AsyncVllmRollout.bind(models["untied"], **{**SMALL, **options})
            with pytest.raises(px.WorkerInitError, match=message):
                px.WorkerGroup(pool, bound, env=env)

    assert engine_processes() <= before[0]
    assert shared_memory() <= before[1]
    assert folders_of_sockets() <= before[2]


def test_a_token_may_begin_with_a_dash() -> None:
    prepare()
    from phalanx.engines.vllm.endpoint import Server

    server = Server("model", "127.0.0.1", 0, "-token-of-16-characters", {"root_path": "-path"})
    server.close()

    assert server._given.api_key == ["-token-of-16-characters"]
    assert server._given.root_path == "-path"
