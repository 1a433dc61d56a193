"""vLLM's OpenAI-compatible HTTP server on the engine of a rank, with a key on every route."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from phalanx.engines.engine_types import Endpoint
from phalanx.engines.vllm.vllm_imports import find
from phalanx.errors import DeclarationError, PhalanxError

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


_START_S = 60.0
_LOOPBACK = "127.0.0.1"
_OWN_ARGUMENTS = {"api_key": "token=", "host": "host=", "port": "port="}


def _server_of(app: Any) -> Any:
    """Return a server without signal handlers, because the process is a rank."""

    class Quiet(find("uvicorn.Server")):  # comes with vLLM
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    return Quiet(
        find("uvicorn.Config")(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )


class EndpointServer:
    """The HTTP server of an engine: it has its port from the constructor on, and serves after :meth:`start`.

    Args:
        model: folder of the model.
        host: address to listen at.
        port: port to listen at. 0 takes a free port.
        key: key that every request needs.
        options: options of ``vllm serve``.

    Raises:
        DeclarationError: if an option is unknown or has an argument of its own, ``host`` is empty, or vLLM's
            development mode is on.
        PhalanxError: if the server cannot listen at this address.
    """

    def __init__(self, model: str, host: str, port: int, key: str, options: dict[str, Any]) -> None:
        _check_development_mode()
        _check_options(options)
        if not host:  # sockets take it for every address
            raise DeclarationError(f"host={host!r}; expected an address; leave it out for {_LOOPBACK}")
        self._key = key
        self._model = model
        self._given = self._arguments(options)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise PhalanxError(
                f"the endpoint cannot listen at {host}, port {port}: {error.strerror}; port=0 takes a free one"
            ) from error
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, llm: Any) -> Endpoint:
        """Serve ``llm`` on the running event loop, and return the endpoint."""
        if llm.model_config.skip_tokenizer_init:
            # A chat is tried first, which has no tokenizer then: a warning with a traceback, in every start.
            logging.getLogger("vllm.renderers.base").setLevel(logging.ERROR)
        tasks = await llm.get_supported_tasks()
        given = self._given
        app = find("vllm.entrypoints.launchers.app.build_app")(given, tasks, llm.model_config)
        state = find("vllm.entrypoints.launchers.api_server.app_state.init_app_state")
        await state(llm, app.state, given, tasks)
        # The outermost application: vLLM itself checks the key on some of its routes only.
        self._server = _server_of(BearerAuth(app, self._key))
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        until = time.monotonic() + _START_S
        while not self._server.started:
            if self._task.done() or time.monotonic() > until:
                raise PhalanxError(f"vLLM's HTTP server did not start in {_START_S:g} s; its log says why")
            await asyncio.sleep(0.01)
        return Endpoint(f"http://{self._address()}/v1", self._key, self._model)

    def _address(self) -> str:
        """Return host and port for URLs."""
        host, port = self._socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # not an address that a client on another node can connect to
            host = _node_address()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _arguments(self, options: dict[str, Any]) -> Any:
        parser = find("vllm.entrypoints.launchers.cli_args.make_arg_parser")(
            find("vllm.utils.argparse_utils.FlexibleArgumentParser")()
        )
        # With the key, vLLM's own check agrees with ours, whatever VLLM_API_KEY says.
        flags = ["--model", self._model, f"--api-key={self._key}", "--disable-log-stats"]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                return parser.parse_args([*flags, *_flags(options)])
        except SystemExit:  # raised by its argument parser, to end a script
            why = said.getvalue().strip().rpartition("error: ")[2]
            raise DeclarationError(
                f"server_options={options!r}: {why}; expected options of `vllm serve`, such as "
                '{"enable_auto_tool_choice": True}'
            ) from None

    async def stop(self) -> None:
        """End it; requests under way are broken off."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=5.0)
        self.close()

    def close(self) -> None:
        """Give the port back, where it does not serve yet, or any more."""
        self._socket.close()


def _check_development_mode() -> None:
    """Reject the mode in which vLLM adds routes that pause the engine, replace its weights and call its workers."""
    mode = os.environ.get("VLLM_SERVER_DEV_MODE", "0")
    if mode != "0":
        raise DeclarationError(
            f"VLLM_SERVER_DEV_MODE is {mode!r}; expected '0', since endpoints have no development routes; unset it, "
            "and use methods of the group instead"
        )


def _check_options(options: dict[str, Any]) -> None:
    """Reject options that other arguments set, and options that this server would ignore."""
    for name in options:
        plain = name.replace("-", "_")
        if plain in _OWN_ARGUMENTS:
            raise DeclarationError(
                f"server_options has {name!r}; expected the argument {_OWN_ARGUMENTS[plain]} for it; "
                "give that instead"
            )
        if plain == "uds" or plain.startswith("ssl_"):
            raise DeclarationError(
                f"server_options has {name!r}; expected none, since endpoints speak plain HTTP over TCP; "
                "put a proxy in front of the endpoint"
            )


def _node_address() -> str:
    """Return this node's address on the route to the group's first rank, else the loopback's."""
    first = os.environ.get("MASTER_ADDR", "")
    if not first:
        return _LOOPBACK
    family = socket.AF_INET6 if ":" in first else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((first, 9))  # sends nothing
        except OSError:
            return _LOOPBACK
        return str(probe.getsockname()[0])


def _flags(options: dict[str, Any]) -> list[str]:
    """Return command-line flags with "=", because a value may begin with a dash."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags.append(flag if value is True else f"{flag}={value}")
    return flags
