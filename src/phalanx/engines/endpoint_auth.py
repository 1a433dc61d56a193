"""ASGI middleware that asks for an endpoint's key on every route, and the check of the key itself."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from phalanx.errors import DeclarationError

__all__ = ["MIN_KEY_LENGTH", "BearerAuth", "choose_key"]

MIN_KEY_LENGTH = 16
"""Characters of the shortest key that is accepted."""

_Message: TypeAlias = "MutableMapping[str, Any]"
_Receive: TypeAlias = "Callable[[], Awaitable[_Message]]"
_Send: TypeAlias = "Callable[[_Message], Awaitable[None]]"
_App: TypeAlias = "Callable[[_Message, _Receive, _Send], Awaitable[None]]"

_BODY = json.dumps(
    {
        "error": {
            "message": "missing or wrong key; expected the header 'Authorization: Bearer KEY' with the endpoint's key",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
).encode()
_HEADERS = (
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"www-authenticate", b"Bearer"),
)
_POLICY_VIOLATION = 1008  # close code of RFC 6455


def choose_key(token: str | None) -> str:
    """Return ``token``, or a generated key if it is None.

    Raises:
        DeclarationError: if ``token`` is too short, or cannot be sent in a header.
    """
    if token is None:
        return secrets.token_urlsafe(32)
    advice = "leave it out for a generated key, or give secrets.token_urlsafe(32)"
    if not isinstance(token, str):
        raise DeclarationError(f"token= is a {type(token).__name__}; expected a str; {advice}")
    if len(token) < MIN_KEY_LENGTH:
        raise DeclarationError(
            f"token= has {len(token)} characters; expected at least {MIN_KEY_LENGTH}; {advice}"
        )
    if not all("!" <= character <= "~" for character in token):
        raise DeclarationError(
            f"token= has characters that a header cannot have; expected visible ASCII without spaces; {advice}"
        )
    return token


class BearerAuth:
    """An ASGI application that passes requests with the key on to ``app``, and answers all others with 401.

    The key is checked for every path and method, and for websockets. Only the server's own lifespan events need none.

    Args:
        app: the protected ASGI application.
        key: the key that clients send as ``Authorization: Bearer KEY``.
    """

    def __init__(self, app: _App, key: str) -> None:
        self.app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan" or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await _reject_websocket(scope, send)
        else:
            await _reject_request(scope, send)

    def _is_authorized(self, scope: _Message) -> bool:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(values) != 1:  # of several headers, vLLM could read another than this check
            return False
        scheme, _, key = values[0].partition(b" ")
        return secrets.compare_digest(_digest(key), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    """Return a digest, so that the time of a comparison does not depend on the length of the key either."""
    return hashlib.sha256(key).digest()


async def _reject_request(scope: _Message, send: _Send) -> None:
    await send({"type": "http.response.start", "status": 401, "headers": list(_HEADERS)})
    body = b"" if scope.get("method") == "HEAD" else _BODY
    await send({"type": "http.response.body", "body": body})


async def _reject_websocket(scope: _Message, send: _Send) -> None:
    if "websocket.http.response" in (scope.get("extensions") or {}):
        await send({"type": "websocket.http.response.start", "status": 401, "headers": list(_HEADERS)})
        await send({"type": "websocket.http.response.body", "body": _BODY})
    else:  # such a server answers the handshake with 403
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
