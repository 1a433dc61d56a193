"""Debian's chromium without a window, driven over the DevTools protocol.

The protocol: chromedevtools.github.io/devtools-protocol.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tornado.ioloop import IOLoop
from tornado.websocket import WebSocketClientConnection, websocket_connect

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. ``complaints`` are errors on its console and in its script, ``asked`` what it loaded."""

    def __init__(self, loop: IOLoop, connection: WebSocketClientConnection) -> None:
        self._loop = loop
        self._connection = connection
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session

        async def write() -> None:
            await self._connection.write_message(json.dumps(message))

        self._loop.run_sync(write, timeout=30)
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        async def read() -> Any:
            return await self._connection.read_message()

        text = self._loop.run_sync(read, timeout=30)
        assert text is not None, "the browser went away"
        answer = json.loads(text)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, event: str, given: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(given["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
            self.complaints.append(json.dumps(given["args"]))
        elif event == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.complaints.append(given["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.asked.append(given["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Move to a point, or press ("mousePressed") and release ("mouseReleased") there."""
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)


@contextmanager
def page(folder: Path, width: int = 1200, height: int = 900) -> Generator[Page]:
    """A tab of a browser of its own, which keeps its files in ``folder``."""
    assert BROWSER is not None
    options = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"]
    options += [f"window-size={width},{height}", f"user-data-dir={folder}", "remote-debugging-port=0"]
    command = [BROWSER, *(f"--{option}" for option in options), "about:blank"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    loop = IOLoop(make_current=False)
    try:
        assert child.stderr is not None
        said: list[str] = []
        for line in child.stderr:  # ends with the browser, or with its address
            said.append(line)
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                break
        else:
            raise AssertionError("".join(said))
        connection = loop.run_sync(lambda: websocket_connect(found[1], max_message_size=1 << 28), timeout=30)
        yield Page(loop, connection)

        async def close() -> None:
            connection.close()

        loop.run_sync(close, timeout=30)
    finally:
        child.kill()
        child.wait(10)
        child.stderr and child.stderr.close()
        loop.close()
