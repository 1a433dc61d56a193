"""vLLM as a role: its tokens, its weight updates, and its HTTP endpoint."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlparse

import pytest

import phalanx as px
from phalanx.engines import Endpoint
from phalanx.engines.vllm import VllmRollout
from phalanx.engines.vllm.endpoint import EndpointServer
from phalanx.engines.vllm.rollout import prepare_vllm
from tests.conformance.engines import GREEDY, LENGTH, PROMPTS, Reference
from tests.engines.vllm.conftest import ONE_THREAD, SMALL, left_since, route_paths, things_of_engines
from tests.engines.vllm.models import OddSource, load_model

WEBSOCKET = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}
ENDLESS = replace(GREEDY, ignore_eos=True)


class Roles(NamedTuple):
    """A source of weights, an engine, the sync between them, and the expected answers."""

    source: px.WorkerGroup
    rollout: px.WorkerGroup
    sync: px.WeightSync
    reference: Reference


@pytest.fixture(scope="module", params=["tied", "tied Llama"])
def roles(request: pytest.FixtureRequest, cluster: None, models: dict[str, str]) -> Iterator[Roles]:
    folder = models[request.param]
    reference = Reference(load_model(folder))
    reference.model.generation_config.eos_token_id = None
    options = {"server_options": {"enable_scale_out": True}}
    with px.ResourcePool([2], use_gpu=False) as pool:
        source = px.WorkerGroup(pool[0:1], OddSource.bind(load_model(folder)), name="source", env=ONE_THREAD)
        bound = VllmRollout.bind(
            folder, tokenizer=models["words"], serve=True, served_model_name=["a", "b"], **options, **SMALL
        )
        rollout = px.WorkerGroup(pool[1:2], bound, name="rollout", env=ONE_THREAD)
        yield Roles(source, rollout, px.WeightSync(source, rollout, "policy"), reference)


def change(roles: Roles, seed: int) -> None:
    """Change the weights of the source and the reference."""
    (state,) = roles.source.change(seed)
    roles.reference.model.load_state_dict(state)


def test_mismatched_weights_are_refused_before_the_engine_is_changed(roles: Roles) -> None:
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

    roles.reference.check_greedy(roles.rollout.generate(PROMPTS, ENDLESS))


def test_tokens_of_16_running_answers_follow_an_update_and_have_its_version(roles: Roles) -> None:
    prompts = [[5 + row, 6] for row in range(16)]
    before = roles.sync().number
    had = roles.rollout.engine_statistics()[0].tokens
    call = roles.rollout.generate.submit(prompts, replace(ENDLESS, max_tokens=100))
    while roles.rollout.engine_statistics()[0].tokens < had + 160:
        pass
    change(roles, 11)
    version = roles.sync().number
    made = call.result()

    for one in made:
        assert {number for number, _ in one.versions} <= {before, version}
        assert (sum(count for _, count in one.versions), one.finish_reason) == (100, "length")
    changed = [pair for pair in zip(prompts, made, strict=True) if len(pair[1].versions) == 2]
    for prompt, one in changed[:3]:
        old = one.versions[0][1]
        assert one.tokens[old:] == roles.reference.generate([*prompt, *one.tokens[:old]], 100 - old)


def test_prompts_answers_and_stops_can_be_texts(roles: Roles) -> None:
    (tokens,) = roles.rollout.generate([[5, 6, 7]], ENDLESS)
    words = [f"w{token}" for token in tokens.tokens]
    (text,) = roles.rollout.generate(["w5 w6 w7"], ENDLESS)
    stop = f"{words[2]} {words[3]}"
    (stopped,) = roles.rollout.generate(["w5 w6 w7"], replace(ENDLESS, stop=(stop,)))

    assert (text.tokens, text.text) == (tokens.tokens, " ".join(words))
    assert stopped.finish_reason == "stop"
    assert stop not in str(stopped.text)


def post(endpoint: Endpoint, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Return the response to a request with the key; without a body it is a GET."""
    headers = {"Authorization": f"Bearer {endpoint.token}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        return json.load(answer)


def served(endpoint: Endpoint, prompt: list[int], count: int) -> tuple[int, ...]:
    """Return the tokens of a completion by HTTP."""
    body = {"model": endpoint.model, "prompt": prompt, "temperature": 0, "max_tokens": count}
    answer = post(
        endpoint, f"{endpoint.url}/completions", {**body, "ignore_eos": True, "return_token_ids": True}
    )
    return tuple(answer["choices"][0]["token_ids"])


def test_the_endpoint_serves_the_weights_of_the_last_sync(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    prompts = PROMPTS[:2]
    for seed in range(2):
        change(roles, seed)
        roles.sync()

        expected = [roles.reference.generate(prompt, 8) for prompt in prompts]
        assert [served(endpoint, prompt, 8) for prompt in prompts] == expected


def test_the_endpoint_generates_tokens_from_tokens(roles: Roles) -> None:
    """vLLM adds the route on request."""
    (endpoint,) = px.engines.endpoints(roles.rollout)
    (expected,) = roles.rollout.generate([[5, 6, 7]], ENDLESS)
    sampling = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    body = {"model": endpoint.model, "token_ids": [5, 6, 7], "sampling_params": sampling}
    place = endpoint.url.removesuffix("/v1")

    answer = post(endpoint, f"{place}/inference/v1/generate", body)

    assert tuple(answer["choices"][0]["token_ids"]) == expected.tokens
    models = post(endpoint, f"{endpoint.url}/models", None)
    assert models["data"][0]["max_model_len"] == 128


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


def test_the_openai_client_streams_gets_log_probabilities_and_needs_the_key(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    openai = pytest.importorskip("openai")  # comes with vLLM
    given = {"model": endpoint.model, "prompt": "w5 w6 w7", "max_tokens": 4, "temperature": 0}
    given["extra_body"] = {"ignore_eos": True}

    with openai.OpenAI(base_url=endpoint.url, api_key=endpoint.token, max_retries=0) as client:
        whole = client.completions.create(**given, logprobs=0).choices[0]
        parts = [part.choices[0].text for part in client.completions.create(**given, stream=True)]

    assert "".join(parts) == whole.text and len(parts) > 1
    assert len(whole.logprobs.token_logprobs) == 4
    with (
        openai.OpenAI(base_url=endpoint.url, api_key="other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.completions.create(**given)
    assert (refused.value.code, endpoint.model) == ("invalid_api_key", "a")


def test_every_route_needs_the_key_and_is_served_at_the_loopback_address(roles: Roles) -> None:
    (endpoint,) = px.engines.endpoints(roles.rollout)
    (paths,) = roles.rollout.run(routes)
    right = {"Authorization": f"Bearer {endpoint.token}"}
    wrong = {"Authorization": f"Bearer {endpoint.token[:-1]}", "Content-Type": "application/json"}
    for path in (*paths, "/no/such/route"):
        for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"):
            for headers in ({}, wrong):
                assert (status(endpoint, path, method, headers), method, path) == (401, method, path)
        assert (status(endpoint, path, "GET", WEBSOCKET), path) == (401, path)
    assert {"/health", "/metrics", "/invocations", "/tokenize", "/v1/completions"} <= paths
    assert endpoint.token not in repr(endpoint)

    assert urlparse(endpoint.url).hostname == "127.0.0.1"
    for path in ("/health", "/metrics", "/v1/models"):
        assert status(endpoint, path, "GET", right) == 200


def test_the_server_has_no_development_routes(roles: Roles) -> None:
    (paths,) = roles.rollout.run(routes)
    (endpoint,) = px.engines.endpoints(roles.rollout)
    removed = {"/pause", "/resume", "/update_weights", "/collective_rpc", "/sleep", "/reset_prefix_cache"}

    assert not removed & paths
    for path in removed:
        assert status(endpoint, path, "POST", {"Authorization": f"Bearer {endpoint.token}"}) == 404


def test_a_failed_start_of_an_engine_leaves_nothing(cluster: None, models: dict[str, str]) -> None:
    """The driver's checks fail, or the process of the engine."""
    before = things_of_engines()
    wrong: dict[str, dict[str, Any]] = {
        "(?s)no_such_thing.*expected options of its HTTP server": {"server_options": {"no_such_thing": 1}},
        "VLLM_SERVER_DEV_MODE is '1'": {"env": {"VLLM_SERVER_DEV_MODE": "1"}},
        "Engine core initialization failed": {"kv_cache_memory_bytes": 1},
    }
    with px.ResourcePool([1], use_gpu=False) as pool:
        for message, options in wrong.items():
            env = {**ONE_THREAD, **options.pop("env", {})}
            bound = VllmRollout.bind(models["untied"], serve=True, **{**SMALL, **options})
            with pytest.raises(px.WorkerInitError, match=message):
                px.WorkerGroup(pool, bound, env=env)

    assert not any(left_since(before))


def test_an_unknown_option_of_vllm_is_named_in_the_error(models: dict[str, str]) -> None:
    with (
        px.ResourcePool([1], backend="inline") as pool,
        pytest.raises(px.WorkerInitError, match=r"unexpected keyword argument 'max_model_length'"),
    ):
        px.WorkerGroup(pool, VllmRollout.bind(models["untied"], max_model_length=8))


def server_of(options: dict[str, Any], port: int = 0, key: str = "k" * 16) -> EndpointServer:
    """Return a server that is not started."""
    prepare_vllm()
    return EndpointServer("127.0.0.1", port, key, options)


def test_a_token_may_begin_with_a_dash_and_a_used_port_is_refused() -> None:
    server = server_of({"root_path": "-path"}, key="-token-of-16-characters")
    port = server._socket.getsockname()[1]
    with pytest.raises(px.PhalanxError, match=rf"cannot listen at 127\.0\.0\.1, port {port}"):
        server_of({}, port)
    asyncio.run(server.stop())

    assert server._options.api_key == ["-token-of-16-characters"]
    assert server._options.root_path == "-path"


def test_options_of_the_server_are_python_values() -> None:
    options = {
        "enable_auto_tool_choice": True,
        "enable_log_deltas": False,
        "default_chat_template_kwargs": {"enable_thinking": False},
        "allowed_origins": ["http://a"],
    }
    server = server_of({**options, "middleware": ("a.b", "c.d"), "response_role": None})
    asyncio.run(server.stop())

    assert {name: getattr(server._options, name) for name in options} == options
    assert (server._options.middleware, server._options.response_role) == (["a.b", "c.d"], "assistant")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 8}, "(?s)max_model_len.*give engine options to VllmRollout"),
        ({"uvicorn_log_level": "loud"}, "Input should be 'critical'"),
    ],
)
def test_unknown_or_invalid_options_of_the_server_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(px.DeclarationError, match=message):
        server_of(options)
