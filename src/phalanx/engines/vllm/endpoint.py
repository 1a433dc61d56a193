"""vLLM's OpenAI-compatible HTTP server on the engine of a rank, with a key on every route."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import time
from pkgutil import resolve_name
from typing import Any

from phalanx.engines.engine_types import Endpoint
from phalanx.errors import DeclarationError, PhalanxError

MIN_KEY_LENGTH = 16
"""Minimum number of characters of a key."""

_MESSAGE = "missing or wrong key; expected the header 'Authorization: Bearer KEY' with the endpoint's key"
_ERROR = {"message": _MESSAGE, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
_BODY = json.dumps({"error": _ERROR}).encode()
_HEADERS = (
    (b"content-type", b"application/json"),
    (b"content-length", str(len(_BODY)).encode()),
    (b"www-authenticate", b"Bearer"),
)


def choose_key(token: str | None) -> str:
    """Return ``token``, or a generated key if it is None.

    Raises:
        DeclarationError: if ``token`` is too short, or cannot be sent in a header.
    """
    if token is None:
        return secrets.token_urlsafe(32)
    if not isinstance(token, str) or not re.fullmatch(rf"[!-~]{{{MIN_KEY_LENGTH},}}", token):
        given = f"has {len(token)} characters" if isinstance(token, str) else f"is a {type(token).__name__}"
        raise DeclarationError(
            f"token= {given}; expected at least {MIN_KEY_LENGTH} characters of visible ASCII without spaces; "
            "leave it out for a generated key, or give secrets.token_urlsafe(32)"
        )
    return token


class BearerAuth:
    """An ASGI application that passes requests with the key on to ``app``, and answers all others with 401.

    The key is checked for every path and method, and for websockets. Only the server's lifespan events need no key.

    Args:
        app: the protected ASGI application.
        key: the key that clients send as ``Authorization: Bearer KEY``.
    """

    def __init__(self, app: Any, key: str) -> None:
        self.app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._is_authorized(scope):
            await self.app(scope, receive, send)
            return
        kind = "websocket.http" if scope["type"] == "websocket" else "http"  # uvicorn supports this extension
        await send({"type": f"{kind}.response.start", "status": 401, "headers": list(_HEADERS)})
        body = b"" if scope.get("method") == "HEAD" else _BODY
        await send({"type": f"{kind}.response.body", "body": body})

    def _is_authorized(self, scope: dict[str, Any]) -> bool:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(values) != 1:  # with several headers, vLLM could check another header than this class
            return False
        scheme, _, key = values[0].partition(b" ")
        return secrets.compare_digest(_digest(key), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    """Return a digest, so that the time of a comparison does not reveal the length of the key either."""
    return hashlib.sha256(key).digest()


_START_S = 60.0
_SERVER_OPTIONS = "vllm.entrypoints.launchers.cli_args:FrontendArgs"
_SHARED_OPTIONS = {"enable_log_requests", "served_model_name", "structured_outputs_config"}
"""Options of the engine that its server reads too."""
_OWN_ARGUMENTS = {"api_key": "token=", "host": "host=", "port": "port="}


class EndpointServer:
    """The HTTP server of an engine. The constructor binds its port; :meth:`start` begins to serve.

    Args:
        model: folder of the model.
        host: address to listen on.
        port: port to listen on. 0 takes a free port.
        key: key that every request needs.
        options: options of ``vllm serve``.

    Raises:
        DeclarationError: if an option is unknown or has an argument of its own, ``host`` is empty, or vLLM's
            development mode is on.
        PhalanxError: if the server cannot listen at this address.
    """

    def __init__(self, model: str, host: str, port: int, key: str, options: dict[str, Any]) -> None:
        options = {name.replace("-", "_"): value for name, value in options.items()}
        _check_options(options)
        if not host:  # sockets would listen on every address
            raise DeclarationError(f"host={host!r}; expected an address; leave it out for 127.0.0.1")
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise DeclarationError(
                f"port={port!r}; expected a whole number from 0 to 65535; 0 takes a free port"
            )
        self._key = key
        self._given = _arguments(model, key, options)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise PhalanxError(
                f"the endpoint cannot listen at {host}, port {port}: {error.strerror}; port=0 takes a free one"
            ) from error
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, llm: Any) -> Endpoint:
        """Serve ``llm`` on the running event loop, and return the endpoint.

        Raises:
            PhalanxError: if the server does not start within 60 s.
        """
        if llm.model_config.skip_tokenizer_init:
            # Without a tokenizer, vLLM's trial of a chat logs a warning with a traceback at every start.
            logging.getLogger("vllm.renderers.base").setLevel(logging.ERROR)
        tasks = await llm.get_supported_tasks()
        given = self._given
        app = resolve_name("vllm.entrypoints.launchers.app:build_app")(given, tasks, llm.model_config)
        state = resolve_name("vllm.entrypoints.launchers.api_server.app_state:init_app_state")
        await state(llm, app.state, given, tasks)
        options = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1}
        # The outermost application: vLLM itself checks the key on some of its routes only. uvicorn comes with vLLM.
        config = resolve_name("uvicorn:Config")(BearerAuth(app, self._key), **options)
        self._server = resolve_name("uvicorn:Server")(config)  # no signal handlers: not the main thread
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        until = time.monotonic() + _START_S
        while not self._server.started:
            if self._task.done() or time.monotonic() > until:
                raise PhalanxError(f"vLLM's HTTP server did not start in {_START_S:g} s; its log says why")
            await asyncio.sleep(0.01)
        name = (given.served_model_name or [given.model])[0]
        return Endpoint(f"http://{self._address()}/v1", self._key, name)

    def _address(self) -> str:
        """Return ``host:port`` for URLs."""
        host, port = self._socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # not an address that a client on another node can connect to
            host = resolve_name("vllm.utils.network_utils:get_ip")()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Stop the server, and release its port. Requests in progress are interrupted after a second."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=5.0)
        self.close()

    def close(self) -> None:
        """Release the port of a server that was not started or has stopped."""
        self._socket.close()


def _check_options(options: dict[str, Any]) -> None:
    """Reject options that other arguments set, and options that this server would ignore.

    Also reject vLLM's development mode, whose routes pause the engine, replace its weights and call its workers.
    """
    mode = os.environ.get("VLLM_SERVER_DEV_MODE", "0")
    if mode != "0":
        raise DeclarationError(
            f"VLLM_SERVER_DEV_MODE is {mode!r}; expected '0', since endpoints have no development routes; unset it, "
            "and use methods of the group instead"
        )
    for name in options:
        if name in _OWN_ARGUMENTS:
            advice = f"use the argument {_OWN_ARGUMENTS[name]} instead"
        elif name == "uds" or name.startswith("ssl_"):
            advice = "expected none, since endpoints speak plain HTTP over TCP; put a proxy in front of the endpoint"
        elif name not in {*_SHARED_OPTIONS, *resolve_name(_SERVER_OPTIONS).__dataclass_fields__}:
            advice = (
                "expected options of its HTTP server, as in `vllm serve`; give engine options to VllmRollout"
            )
        else:
            continue
        raise DeclarationError(f"server_options has {name!r}; {advice}")


def _arguments(model: str, key: str, options: dict[str, Any]) -> Any:
    """Return the parsed arguments of ``vllm serve``."""
    parser = resolve_name("vllm.entrypoints.launchers.cli_args:make_arg_parser")(
        resolve_name("vllm.utils.argparse_utils:FlexibleArgumentParser")(exit_on_error=False)
    )
    # With the key, vLLM's own check agrees with ours, whatever VLLM_API_KEY says.
    flags = ["--model", model, f"--api-key={key}", "--disable-log-stats"]
    actions = {action.dest: action for action in parser._actions}
    for name, value in options.items():
        is_list = isinstance(value, list | tuple) and actions[name].type is not json.loads
        texts = [one if isinstance(one, str) else json.dumps(one) for one in (value if is_list else [value])]
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{name}")
        elif is_list and actions[name].nargs == "+":
            flags += [f"--{name}", *texts]
        elif value is not None:  # with "=", because a value may begin with a dash
            flags += [f"--{name}={text}" for text in texts]
    try:
        return parser.parse_args(flags)
    except (argparse.ArgumentError, SystemExit) as error:  # SystemExit comes with a message in the rank's log
        raise DeclarationError(f"server_options={options!r}: {error}; see `vllm serve --help`") from None
