"""Channels and stalenesses as another process uses them: over a connection, which is one to this process here."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

import phalanx as px
from phalanx.channels import channel as channels
from phalanx.channels import service_connection as connections
from phalanx.channels import staleness as stalenesses
from phalanx.channels.server import Server
from phalanx.channels.service_connection import Address, Connection
from phalanx.channels.services import services
from phalanx.channels.staleness_server import StalenessService
from tests.support.fault_workers import within

WITHIN = 30.0


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """Have all handles ask over a connection."""
    server = Server("127.0.0.1")
    connection = Connection(Address("127.0.0.1", server.address[1], server.token))
    for module in (channels, stalenesses):
        monkeypatch.setattr(module, "port_to", lambda *_: connection)
    yield connection
    server.stop()


@pytest.fixture
def channel() -> Iterator[px.Channel]:
    with px.Channel(2, backend="inline") as made:
        yield made


@pytest.fixture
def staleness() -> px.StalenessManager:
    return px.StalenessManager(max_lag=0, rows_per_version=4, backend="inline")


def test_a_get_that_is_cancelled_leaves_the_connection_as_it_was(channel: px.Channel) -> None:
    async def cancelled() -> str:
        waiting = asyncio.ensure_future(channel.get_async())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        channel.put("first", WITHIN)
        return await channel.get_async(WITHIN)

    assert asyncio.run(cancelled()) == "first"
    assert channel.depth.takes == 0


class Raising:
    """A service that fails at each request."""

    key = "channel/raising/1"

    def ask(self, *_: Any) -> None:
        raise TypeError("no such thing")

    def left(self, *_: Any) -> None:
        """Nobody was there."""

    def tick(self) -> None:
        """No deadline."""


def test_a_request_that_fails_at_its_home_is_an_error_where_it_was_asked(far: Connection) -> None:
    services.add(service := Raising())
    try:
        reply = far.ask(service.key, "look")
        with pytest.raises(px.errors.InternalError, match="look: TypeError: no such thing"):
            reply.future.result(WITHIN)
    finally:
        services.remove(service)


def test_rows_of_a_lease_are_put_and_followed(channel: px.Channel, staleness: px.StalenessManager) -> None:
    with staleness.begin(4, WITHIN) as lease:
        assert lease.put(channel, [1, 2], 0, WITHIN) == 2
        assert asyncio.run(lease.put_async(channel, [3, 4], 0, WITHIN)) == 2
    assert channel.drop("filtered") == 2
    assert staleness.paced.dropped == {"dropped in the channel": 4}


def test_rows_whose_put_waits_when_their_process_goes_give_their_credit_back(
    far: Connection, channel: px.Channel, staleness: px.StalenessManager
) -> None:
    async def put() -> None:
        lease = await staleness.begin_async(4, WITHIN)
        waiting = asyncio.ensure_future(lease.put_async(channel, [1, 2, 3, 4], 0))
        while not channel.depth.puts:
            await asyncio.sleep(0)
        far._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(px.channels.ChannelClosed, match="gone"):
            await waiting

    home = services.get(staleness.card.key)
    assert isinstance(home, StalenessService)
    channel.put("first", WITHIN)
    channel.put("second", WITHIN)
    asyncio.run(put())
    assert within(WITHIN, lambda: sum(home.state().dropped.values()) == 4)
    assert home.state().ready == ()


def test_what_a_callback_raises_is_told_and_stops_nobody(
    staleness: px.StalenessManager, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("of the user")

    with staleness.begin(2, WITHIN, on_overdue=fails) as lease:
        staleness.advance(1)
        staleness.advance(2)
        assert staleness.version == 2
        assert lease.overdue
    assert within(WITHIN, lambda: "of the user" in caplog.text)


def test_a_callback_may_drop_the_rows_that_it_hears_of(staleness: px.StalenessManager) -> None:
    dropped = threading.Event()

    def abort() -> None:
        lease.drop(2, "aborted")
        dropped.set()

    with staleness.begin(2, WITHIN, on_overdue=abort) as lease:
        staleness.advance(1)
        assert dropped.wait(WITHIN)
    assert staleness.paced.dropped == {"aborted": 2}


class Early(Future[Any]):
    """As another thread sees it, a moment before it is done."""

    def done(self) -> bool:
        return False


class EndsAfterwards:
    """The lock of a connection, which ends as soon as that is let go of for the first time."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, connection._lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._connection._lock = self._lock
        self._lock.release()
        self._connection._end()


def test_what_is_asked_as_a_connection_ends_is_answered_once(
    far: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "Future", Early)
    monkeypatch.setattr(far, "_lock", EndsAfterwards(far))
    assert far.ask("channel/elsewhere/1", "look").future.result(0) == ("gone", connections.OWNER_GONE)


def test_nothing_is_written_to_what_has_the_number_of_a_stopped_servers_pipe() -> None:
    server = Server("127.0.0.1")
    number = server._woken
    reader, writer = os.pipe()
    server.stop()
    os.dup2(writer, number)
    server.wake()
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    for each in (reader, writer, number):
        os.close(each)
