"""The key of endpoints: every request needs it, and it cannot be a short one."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from typing import Any

import pytest

import phalanx as px
from phalanx.engines.vllm import VllmRollout
from phalanx.engines.vllm.endpoint import BearerAuth, EndpointServer, choose_key

KEY = "k" * 16
RIGHT = [(b"authorization", f"Bearer {KEY}".encode())]
WRONG = {
    "no key": [],
    "another key": [(b"authorization", b"Bearer " + b"x" * 16)],
    "a part of the key": [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
    "a longer key": [(b"authorization", f"Bearer {KEY}k".encode())],
    "an empty key": [(b"authorization", b"Bearer ")],
    "the key alone": [(b"authorization", KEY.encode())],
    "another scheme": [(b"authorization", f"Basic {KEY}".encode())],
    "another header": [(b"x-api-key", KEY.encode())],
    "bytes that are no text": [(b"authorization", b"Bearer \xff\xfe")],
    "two headers": [*RIGHT, (b"authorization", b"Bearer " + b"x" * 16)],
}
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "ANYTHING")


class Application:
    """An ASGI application that counts the requests that reach it."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await send({"type": "passed", "received": await receive()})


def call(scope: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages sent for ``scope``, and the scopes that reached the application."""
    app, sent = Application(), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BearerAuth(app, KEY)(scope, receive, send))
    return sent, app.scopes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/../health", "//x", "*", ""])
def test_every_method_and_path_needs_the_key(method: str, path: str) -> None:
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    (start, body), reached = call(scope)

    assert reached == []
    assert start["status"] == 401
    assert dict(start["headers"])[b"www-authenticate"] == b"Bearer"
    assert (body["body"] == b"") is (method == "HEAD")

    sent, reached = call({**scope, "headers": RIGHT})
    assert [message["type"] for message in sent] == ["passed"]
    assert reached == [{**scope, "headers": RIGHT}]


@pytest.mark.parametrize("kind", ["http", "websocket", "unknown"])
@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_key_does_not_reach_the_application(kind: str, headers: list[Any]) -> None:
    sent, reached = call({"type": kind, "path": "/v1/models", "headers": headers})

    assert reached == []
    assert [message["type"] for message in sent] in (
        ["http.response.start", "http.response.body"],
        ["websocket.close"],
    )


def test_the_names_of_header_and_scheme_have_any_case() -> None:
    headers = [(b"Authorization", f"bEARER {KEY}".encode())]

    assert call({"type": "http", "path": "/", "headers": headers})[1]


def test_the_body_tells_clients_of_openai_the_reason() -> None:
    (start, body), _ = call({"type": "http", "method": "GET", "path": "/", "headers": []})

    assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


def test_a_websocket_is_refused_before_it_is_accepted() -> None:
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}

    assert [message["type"] for message in call(scope)[0]] == ["websocket.close"]
    (start, body), reached = call({**scope, "extensions": {"websocket.http.response": {}}})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["type"] == "websocket.http.response.body"
    assert reached == []
    assert call({**scope, "headers": RIGHT})[1]


def test_the_lifespan_of_the_server_needs_no_key() -> None:
    assert call({"type": "lifespan"})[1] == [{"type": "lifespan"}]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def compare(a: bytes, b: bytes) -> bool:
        lengths.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(secrets, "compare_digest", compare)
    for headers in (RIGHT, *WRONG.values()):
        call({"type": "http", "path": "/", "headers": headers})

    assert set(lengths) == {(32, 32)}


def test_a_key_is_generated() -> None:
    first, second = choose_key(None), choose_key(None)

    assert first != second
    assert choose_key(first) == first
    assert choose_key(KEY) == KEY


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "has 0 characters; expected at least 16; leave it out"),
        ("secret-of-15-ch", "has 15 characters; expected at least 16"),
        ("a key of 16 characters and more", "expected visible ASCII without spaces"),
        ("a-key-of-\n-16-characters", "expected visible ASCII"),
        ("schlüssel-mit-16-zeichen", "expected visible ASCII"),
        (1234567890123456, "is a int; expected a str"),
    ],
)
def test_a_key_that_protects_little_is_refused(token: Any, message: str) -> None:
    with pytest.raises(px.DeclarationError, match=message) as refused:
        choose_key(token)
    assert not token or str(token) not in str(refused.value)


def test_an_engine_with_a_short_key_does_not_start() -> None:
    with (
        px.ResourcePool([1], backend="inline") as pool,
        pytest.raises(px.WorkerInitError, match="has 5 characters; expected at least 16"),
    ):
        px.WorkerGroup(pool, VllmRollout.bind("model", serve=True, token="short"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key": KEY}, "expected the argument token= for it"),
        ({"api-key": KEY}, "expected the argument token= for it"),
        ({"host": "0.0.0.0"}, "expected the argument host= for it"),
        ({"port": 80}, "expected the argument port= for it"),
        ({"ssl_keyfile": "key.pem"}, "plain HTTP over TCP"),
        ({"uds": "/tmp/socket"}, "plain HTTP over TCP"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(px.DeclarationError, match=message):
        EndpointServer("model", "127.0.0.1", 0, KEY, options)


def test_the_empty_address_is_refused() -> None:
    """Sockets would listen at every address."""
    with pytest.raises(px.DeclarationError, match=r"host=''; expected an address"):
        EndpointServer("model", "", 0, KEY, {})


def test_the_development_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(px.DeclarationError, match="VLLM_SERVER_DEV_MODE is '1'; expected '0'"):
        EndpointServer("model", "127.0.0.1", 0, KEY, {})


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1:"), ("0.0.0.0", "127.0.0.1:"), ("::1", "[::1]:")]
)
def test_the_url_has_an_address_to_connect_to(host: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndpointServer, "_arguments", lambda *_: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    server = EndpointServer("model", host, 0, KEY, {})
    address = server._address()
    server.close()

    assert address.startswith(shown)


def test_options_of_a_server_need_a_server() -> None:
    with (
        px.ResourcePool([1], backend="inline") as pool,
        pytest.raises(px.WorkerInitError, match="expected serve=True"),
    ):
        px.WorkerGroup(pool, VllmRollout.bind("model", token=KEY))
