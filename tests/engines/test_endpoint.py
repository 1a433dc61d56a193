"""Keys of endpoints, which every request needs, and options of their server."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import Any

import pytest

import phalanx as px
from phalanx.engines.vllm import VllmRollout, endpoint
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


def call(scope: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the scopes that were refused, and those that reached the application."""
    refused, reached = list[Any](), list[Any]()

    def application(scopes: list[Any]) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)

        return app

    auth = BearerAuth(application(reached), KEY, application(refused))
    asyncio.run(auth(scope, None, None))
    return refused, reached


@pytest.mark.parametrize("kind", ["http", "websocket", "unknown"])
@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
def test_a_request_with_a_wrong_key_does_not_reach_the_application(kind: str, headers: list[Any]) -> None:
    scope = {"type": kind, "method": "OPTIONS", "path": "/health", "headers": headers}
    odd = [(b"Authorization", f"bEARER {KEY}".encode())]  # names in any case

    assert call(scope) == ([scope], [])
    for right in ({**scope, "headers": RIGHT}, {**scope, "headers": odd}, {"type": "lifespan"}):
        assert call(right) == ([], [right])


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    monkeypatch.setattr(secrets, "compare_digest", lambda a, b: bool(lengths.append((len(a), len(b)))))
    for headers in (RIGHT, *WRONG.values()):
        call({"type": "http", "path": "/", "headers": headers})

    assert set(lengths) == {(32, 32)}


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("secret-of-15-ch", "has 15 characters; expected at least 16"),
        ("a key of 16 characters and more", "expected .* visible ASCII without spaces"),
        ("a-key-of-16-characters\n", "visible ASCII"),
        (1234567890123456, "is a int; expected at least"),
    ],
)
def test_a_missing_key_is_generated_and_a_weak_key_is_refused(token: Any, message: str) -> None:
    with pytest.raises(px.DeclarationError, match=message) as refused:
        choose_key(token)
    assert str(token) not in str(refused.value)
    first = choose_key(None)
    assert first != choose_key(None)
    assert (choose_key(first), choose_key(KEY)) == (first, KEY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"serve": True, "token": "short"}, "has 5 characters; expected at least 16"),
        ({"token": KEY}, "expected serve=True"),
    ],
)
def test_an_engine_with_a_wrong_token_does_not_start(options: dict[str, Any], message: str) -> None:
    with px.ResourcePool([1], backend="inline") as pool, pytest.raises(px.WorkerInitError, match=message):
        px.WorkerGroup(pool, VllmRollout.bind("model", **options))


@pytest.mark.parametrize(
    ("host", "port", "options", "message"),
    [
        ("127.0.0.1", 70000, {}, "port=70000; expected"),
        ("127.0.0.1", True, {}, "port=True; expected"),
        ("127.0.0.1", 0, {"api-key": KEY}, "use the argument token= instead"),
        ("127.0.0.1", 0, {"ssl_keyfile": "key.pem"}, "plain HTTP over TCP"),
        ("127.0.0.1", 0, {"uds": "/tmp/socket"}, "plain HTTP over TCP"),
        ("127.0.0.1", 0, {"grpc_port": 5}, "plain HTTP over TCP"),
        ("127.0.0.1", 0, {"enable_ssl_refresh": True}, "plain HTTP over TCP"),
        ("", 0, {}, "host=''; expected an address"),  # sockets would listen at every address
    ],
)
def test_invalid_or_conflicting_server_options_and_the_development_mode_are_refused(
    monkeypatch: pytest.MonkeyPatch, host: str, port: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(px.DeclarationError, match=message):
        EndpointServer(host, port, KEY, options)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(px.DeclarationError, match="VLLM_SERVER_DEV_MODE is '1'; expected '0'"):
        EndpointServer("127.0.0.1", 0, KEY, {})


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "127.0.0.1:"), ("0.0.0.0", "10.0.0.7:"), ("::1", "[::1]:")]
)
def test_the_url_of_an_endpoint_has_an_address_to_connect_to(
    host: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_server_options", lambda *_: None)
    monkeypatch.setattr(endpoint, "resolve_name", lambda _: lambda: "10.0.0.7")
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 on this machine")
    server = EndpointServer(host, 0, KEY, {})
    address = server._address()
    asyncio.run(server.stop())

    assert address.startswith(shown)
