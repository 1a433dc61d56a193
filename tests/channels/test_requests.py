"""Waiting for the answer of a home: what is answered to somebody who waits no longer."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import phalanx as px
from phalanx.channels import requests
from phalanx.channels.service_client import port_to
from phalanx.channels.services import Reply

KEY = "channel/elsewhere/1"


class Elsewhere:
    """A way to a home in another process, which answers when the test says so."""

    peer = "a rank"

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def ask(self, key: str, verb: str, *args: Any) -> Reply:
        return Reply(0, Future())

    def say(self, key: str, verb: str, *args: Any) -> None:
        self.said.append((verb, *args))

    def hear(self, key: str, listener: Callable[[Any], None]) -> None:
        """It tells nothing."""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_LATE_S", 0.0)


def waited(port: Elsewhere, reply: Reply) -> Any:
    return requests.answered(KEY, port, reply, 0.0, "take", "of another")


def awaited(port: Elsewhere, reply: Reply) -> Any:
    return asyncio.run(requests.answered_async(KEY, port, reply, 0.0))


@pytest.mark.parametrize("wait", [waited, awaited])
def test_what_is_given_after_its_taker_gave_up_goes_back(wait: Callable[[Elsewhere, Reply], Any]) -> None:
    port = Elsewhere()
    reply = port.ask(KEY, "take")
    assert wait(port, reply) == requests.OVERDUE
    reply.future.set_result(("given", 7, (), False))
    assert port.said == [("cancel", 0), ("back", 7, frozenset())]


def test_a_wait_is_over_where_futures_have_a_time_out_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class TimeoutError310(Exception):
        """As in Python 3.10, where this is not the built-in one."""

    class Waiting(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise TimeoutError310

    monkeypatch.setattr(concurrent.futures, "TimeoutError", TimeoutError310)
    assert waited(Elsewhere(), Reply(0, Waiting())) == requests.OVERDUE


def test_what_is_given_to_a_taker_whose_task_was_cancelled_goes_back() -> None:
    port = Elsewhere()
    reply = port.ask(KEY, "take")

    async def cancelled() -> None:
        waiting = asyncio.ensure_future(requests.answered_async(KEY, port, reply, None))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancelled())
    reply.future.set_result(("given", 7, (), False))
    assert port.said == [("cancel", 0), ("back", 7, frozenset())]


def test_what_was_made_inline_is_not_reached_from_another_process() -> None:
    with pytest.raises(px.DeclarationError, match="this channel was made on the inline backend"):
        port_to(KEY, None)
