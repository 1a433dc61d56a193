"""vLLM's own HTTP server, OpenAI-compatible, on the engine of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
import socket
import time
from typing import Any

from phalanx.engines.engine_types import Endpoint
from phalanx.engines.vllm.vllm_imports import find
from phalanx.errors import DeclarationError, PhalanxError

__all__ = ["Server"]

_START_S = 60.0


def _server_of(app: Any) -> Any:
    """A server that leaves signals alone, for the process is a rank."""

    class Quiet(find("uvicorn.Server")):  # comes with vLLM
        def capture_signals(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    return Quiet(
        find("uvicorn.Config")(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )


class Server:
    """Serves an engine from :meth:`start` on, which is for the loop of its client; it has its port from the beginning.

    Raises:
        DeclarationError: vLLM's server knows no such options.
        PhalanxError: it cannot listen there.
    """

    def __init__(self, model: str, host: str, port: int, token: str | None, options: dict[str, Any]) -> None:
        self._token = token or secrets.token_urlsafe(32)
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
        """Serve; where that is."""
        if llm.model_config.skip_tokenizer_init:
            # A chat is tried first, which has no tokenizer then: a warning with a traceback, in every start.
            logging.getLogger("vllm.renderers.base").setLevel(logging.ERROR)
        tasks = await llm.get_supported_tasks()
        given = self._given
        app = find("vllm.entrypoints.launchers.app.build_app")(given, tasks, llm.model_config)
        state = find("vllm.entrypoints.launchers.api_server.app_state.init_app_state")
        await state(llm, app.state, given, tasks)
        self._server = _server_of(app)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        until = time.monotonic() + _START_S
        while not self._server.started:
            if self._task.done() or time.monotonic() > until:
                raise PhalanxError(f"vLLM's HTTP server did not start in {_START_S:g} s; its log says why")
            await asyncio.sleep(0.01)
        host, port = self._socket.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        return Endpoint(f"http://{name}:{port}/v1", self._token, self._model)

    def _arguments(self, options: dict[str, Any]) -> Any:
        parser = find("vllm.entrypoints.launchers.cli_args.make_arg_parser")(
            find("vllm.utils.argparse_utils.FlexibleArgumentParser")()
        )
        flags = ["--model", self._model, f"--api-key={self._token}", "--disable-log-stats"]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                return parser.parse_args([*flags, *_flags(options)])
        except SystemExit:  # what its parser does where a script would end
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


def _flags(options: dict[str, Any]) -> list[str]:
    """With "=", for a value may begin with a dash."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags.append(flag if value is True else f"{flag}={value}")
    return flags
