"""Messages between runner and contender: a JSON object per line, a response per request.

A contender has its own process, interpreter, environment and Ray cluster. It responds on a private copy of its
standard output; output of libraries goes to standard error, which the runner keeps in a file and quotes if the
contender dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Handler = Callable[[str, dict[str, Any]], Any]


class RequestFailed(Exception):
    """The contender responded that the request failed; it can take the next request."""


class ContenderLost(Exception):
    """The contender's process ended or did not respond in time; it takes no more requests."""


class Peer:
    """The runner's end: starts a contender's process and sends it requests in sequence."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path
    ) -> None:
        self.name = name
        self._log = log
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        output = self._process.stdout
        if output is None or self._process.stdin is None:
            raise ContenderLost(f"{name}: no pipes to the process")
        self._output = output
        self._input = self._process.stdin
        self._selector.register(self._output, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self,
        op: str,
        *,
        timeout: float = 120.0,
        on_wait: Callable[[], None] | None = None,
        interval: float = 0.01,
        **args: Any,
    ) -> Any:
        """Send a request and return the response.

        on_wait is called about every `interval` seconds while waiting.

        Raises:
            RequestFailed: if the contender reports an error.
            ContenderLost: if it died, or did not respond within the timeout in seconds.
        """
        line = json.dumps({"op": op, "args": args}) + "\n"
        try:
            self._input.write(line.encode())
            self._input.flush()
        except OSError as error:
            raise ContenderLost(self._epitaph(f"could not be asked for {op}: {error}")) from error
        answer = json.loads(self._read_line(op, timeout, on_wait, interval))
        if not answer["ok"]:
            raise RequestFailed(f"{self.name}: {op} failed: {answer['error']}")
        return answer["value"]

    def close(self, grace: float = 20.0) -> None:
        """Ask the contender to exit, then end the rest of its process group."""
        with contextlib.suppress(ContenderLost, RequestFailed, OSError):
            self.ask("quit", timeout=grace)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace)
        self.kill()

    def kill(self) -> None:
        """End the whole process group of the contender at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
        self._selector.close()

    def _read_line(
        self, op: str, timeout: float, on_wait: Callable[[], None] | None, interval: float
    ) -> bytes:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self.kill()
                raise ContenderLost(self._epitaph(f"gave no answer to {op} in {timeout:.0f} s"))
            if not self._selector.select(interval if on_wait else min(left, 1.0)):
                if on_wait:
                    on_wait()
                continue
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                raise ContenderLost(self._epitaph(f"ended while asked for {op}"))
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _epitaph(self, what: str) -> str:
        tail = self._log.read_text(errors="replace").splitlines()[-8:]
        return f"{self.name} {what}; its last lines:\n" + "\n".join(tail)


def serve(handler: Handler) -> None:
    """Run the contender's end: respond to requests until `quit` or the end of the input."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            channel.write(json.dumps({"ok": True, "value": None}) + "\n")
            return
        channel.write(json.dumps(_answer(handler, request)) + "\n")


def _answer(handler: Handler, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": True, "value": handler(request["op"], request["args"])}
    except Exception as error:
        traceback.print_exc()
        return {"ok": False, "error": f"{type(error).__name__}: {_shortened(str(error))}"}


def _shortened(text: str) -> str:
    """Return the first line of a text and the last, where the remote cause is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[0][:300] if len(lines) == 1 else f"{lines[0][:300]} ... {lines[-1][:300]}"
