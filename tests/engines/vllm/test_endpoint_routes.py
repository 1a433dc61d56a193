"""No route of vLLM's application is reached without the key, whatever vLLM's tasks and modes add to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import phalanx as px
from phalanx.engines.vllm.endpoint import BearerAuth, EndpointServer
from phalanx.engines.vllm.vllm_imports import find, prepare
from tests.engines.vllm.conftest import route_paths

KEY = "a-key-for-these-tests"
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
HEADERS: dict[str, list[tuple[bytes, bytes]]] = {
    "no key": [],
    "a wrong key": [(b"authorization", b"Bearer another-key-for-these-tests")],
}


@pytest.fixture(scope="module")
def app() -> Any:
    """vLLM's application with the routes of all tasks, of the development mode, and of optional features."""
    prepare()
    options = {"enable_scale_out": True, "enable_offline_docs": True, "tokens_only": True}
    server = EndpointServer("model", "127.0.0.1", 0, KEY, options)
    server.close()
    tasks = get_args(find("vllm.tasks.SupportedTask"))
    model = SimpleNamespace(get_pooling_task=lambda _: "embed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        return find("vllm.entrypoints.launchers.app.build_app")(server._given, tasks, model)


def answer(app: Any, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that the application sends."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS.keys())
def test_no_route_is_reached_without_the_key(app: Any, headers: list[tuple[bytes, bytes]]) -> None:
    protected = BearerAuth(app, KEY)
    paths = route_paths(app)
    for path in (*paths, "/no/such/route"):
        scope = {"path": path, "raw_path": path.encode(), "headers": headers, "query_string": b""}
        for method in METHODS:
            start, _ = answer(protected, {**scope, "type": "http", "method": method})
            assert (start["status"], method, path) == (401, method, path)
            assert (b"www-authenticate", b"Bearer") in start["headers"]
        extensions = {"websocket.http.response": {}}
        start, _ = answer(protected, {**scope, "type": "websocket", "extensions": extensions})
        assert (start["status"], path) == (401, path)

    known = {
        "/health",
        "/metrics",
        "/invocations",
        "/tokenize",
        "/pooling",
        "/score",
        "/pause",
        "/update_weights",
    }
    known |= {"/collective_rpc", "/abort_requests", "/v1/realtime", "/inference/v1/generate", "/static"}
    assert known <= paths  # routes that vLLM itself leaves open are among them


def test_the_port_of_an_endpoint_is_taken() -> None:
    prepare()
    first = EndpointServer("model", "127.0.0.1", 0, KEY, {})
    port = first._socket.getsockname()[1]
    with pytest.raises(px.PhalanxError, match=rf"cannot listen at 127\.0\.0\.1, port {port}"):
        EndpointServer("model", "127.0.0.1", port, KEY, {})
    first.close()
