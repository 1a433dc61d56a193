"""vLLM's OpenAI-compatible HTTP server on the engine of a rank, with a key on every route."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import re
import secrets
import socket
from pkgutil import resolve_name
from typing import Any

from phalanx.engines.engine_types import Endpoint
from phalanx.errors import DeclarationError, PhalanxError

MIN_KEY_LENGTH = 16
"""Minimum number of characters of a key."""

_MESSAGE = "missing or wrong key; expected the header 'Authorization: Bearer KEY' with the endpoint's key"
_ERROR = {"message": _MESSAGE, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
_REFUSAL, _CHALLENGE = {"error": _ERROR}, {"www-authenticate": "Bearer"}


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
    """An ASGI application that passes requests with the key on to ``app``, and all others to ``refusal``.

    The key is checked for every path and method, and for websockets. Only the server's lifespan events need no key.

    Args:
        app: the protected ASGI application.
        key: the key that clients send as ``Authorization: Bearer KEY``.
        refusal: ASGI application that responds with 401.
    """

    def __init__(self, app: Any, key: str, refusal: Any) -> None:
        self.app, self._refusal = app, refusal
        self._digest = _digest(key.encode())

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        is_allowed = scope["type"] == "lifespan" or self._is_authorized(scope)
        await (self.app if is_allowed else self._refusal)(scope, receive, send)

    def _is_authorized(self, scope: dict[str, Any]) -> bool:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(values) != 1:  # with several headers, vLLM could check another header than this class
            return False
        scheme, _, key = values[0].partition(b" ")
        return secrets.compare_digest(_digest(key), self._digest) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    """Return a digest, so that the time of a comparison does not reveal the length of the key either."""
    return hashlib.sha256(key).digest()


_OWN_ARGUMENTS = {"api_key": "token=", "host": "host=", "port": "port="}


class EndpointServer:
    """The HTTP server of an engine. The constructor binds its port; :meth:`start` begins to serve.

    Args:
        host: address to listen on.
        port: port to listen on. 0 takes a free port.
        key: key that every request needs.
        options: options of ``vllm serve`` that are not the engine's.

    Raises:
        DeclarationError: if an option is unknown or has an argument of its own, ``host`` is empty, or vLLM's
            development mode is on.
        PhalanxError: if the server cannot listen at this address.
    """

    def __init__(self, host: str, port: int, key: str, options: dict[str, Any]) -> None:
        if not host:  # sockets would listen on every address
            raise DeclarationError(f"host={host!r}; expected an address; leave it out for 127.0.0.1")
        if type(port) is not int or not 0 <= port < 1 << 16:
            raise DeclarationError(f"port={port!r}; expected a number from 0 to 65535; 0 takes a free port")
        self.endpoint: Endpoint | None = None
        self._key = key
        self._options = _server_options(key, options)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise PhalanxError(
                f"the endpoint cannot listen at {host}, port {port}: {error.strerror}; port=0 takes a free one"
            ) from error

    async def start(self, llm: Any, arguments: Any) -> None:
        """Serve ``llm`` on the running event loop; ``endpoint`` is known afterwards.

        Args:
            llm: vLLM's ``AsyncLLM``.
            arguments: the ``AsyncEngineArgs`` of ``llm``.

        Raises:
            PhalanxError: if the server does not start.
        """
        if llm.model_config.skip_tokenizer_init:
            # Without a tokenizer, vLLM's trial of a chat logs a warning with a traceback at every start.
            logging.getLogger("vllm.renderers.base").setLevel(logging.ERROR)
        tasks, options = await llm.get_supported_tasks(), self._options
        given = argparse.Namespace(**{**vars(arguments), **vars(options)})  # as `vllm serve` parses both
        given.structured_outputs_config = llm.vllm_config.structured_outputs_config
        if isinstance(given.served_model_name, str):
            given.served_model_name = [given.served_model_name]
        app = resolve_name("vllm.entrypoints.launchers.app:build_app")(given, tasks, llm.model_config)
        state = resolve_name("vllm.entrypoints.launchers.api_server.app_state:init_app_state")
        await state(llm, app.state, given, tasks)
        # The outermost application: vLLM itself checks the key on some of its routes only. uvicorn comes with vLLM.
        refusal = resolve_name("starlette.responses:JSONResponse")(_REFUSAL, 401, _CHALLENGE)
        outermost = BearerAuth(app, self._key, refusal)
        log = {"log_level": options.uvicorn_log_level, "access_log": not options.disable_uvicorn_access_log}
        config = resolve_name("uvicorn:Config")(outermost, **log, timeout_graceful_shutdown=1)
        self._server = resolve_name("uvicorn:Server")(config)  # no signal handlers: not the main thread
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                raise PhalanxError("vLLM's HTTP server did not start; its log says why")
            await asyncio.sleep(0.01)
        url = f"http://{self._address()}/v1"
        self.endpoint = Endpoint(url, self._key, llm.model_config.served_model_name)

    def _address(self) -> str:
        """Return ``host:port`` for URLs."""
        host, port = self._socket.getsockname()[:2]
        if host in ("0.0.0.0", "::"):  # not an address that a client on another node can connect to
            host = resolve_name("vllm.utils.network_utils:get_ip")()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """End the server, and release its port. Requests in progress are interrupted after a second."""
        if self.endpoint is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=5.0)
        self._socket.close()


def _server_options(key: str, options: dict[str, Any]) -> Any:
    """Return vLLM's ``FrontendArgs``; their defaults here write no line per request to the rank's log.

    Reject options that other arguments set, and options of other kinds of servers. Also reject vLLM's development mode,
    whose routes pause the engine, replace its weights and call its workers.
    """
    mode = os.environ.get("VLLM_SERVER_DEV_MODE", "0")
    if mode != "0":
        raise DeclarationError(
            f"VLLM_SERVER_DEV_MODE is {mode!r}; expected '0', since endpoints have no development routes; unset it, "
            "and use methods of the group instead"
        )
    given: dict[str, Any] = {"uvicorn_log_level": "warning", "disable_uvicorn_access_log": True}
    given |= {name.replace("-", "_"): value for name, value in options.items() if value is not None}
    for name in given:
        if name in _OWN_ARGUMENTS:
            advice = f"use the argument {_OWN_ARGUMENTS[name]} instead"
        elif name in ("uds", "grpc_port") or "ssl_" in name:
            advice = "expected none, since endpoints speak plain HTTP over TCP; put a proxy in front of the endpoint"
        else:
            continue
        raise DeclarationError(f"server_options has {name!r}; {advice}")
    try:
        checked = resolve_name("vllm.entrypoints.launchers.cli_args:FrontendArgs")(**given)
    except ValueError as error:
        raise DeclarationError(
            f"server_options={options!r}: {error}; expected options of its HTTP server, as in `vllm serve`; give "
            "engine options to VllmRollout"
        ) from None
    checked.api_key = [key]  # so that vLLM's own check agrees with ours, whatever VLLM_API_KEY says
    return checked
