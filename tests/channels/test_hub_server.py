"""The hub over connections: authentication, bad input, peers that die or do not read."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.channels import hub
from phalanx.channels.hub import Hub, HubServer
from phalanx.channels.hub_client import RemoteClient, hubs
from tests.support.fault_workers import within

WITHIN = 30.0
KEY = "channel/other/1"


@pytest.fixture(scope="module")
def server() -> HubServer:
    return HubServer(Hub(), "127.0.0.1")


@pytest.fixture
def client(server: HubServer) -> Iterator[RemoteClient]:
    made = RemoteClient(server.address)
    made.request("", "open", KEY, "name", 2, "items")
    yield made
    made.close()


def put(client: RemoteClient, data: bytes) -> Any:
    request, answer = client.ask(KEY, "put", (data, len(data), None, ()), None)
    client.send(KEY, "cancel", request)
    return answer.result(WITHIN)


def raw(server: HubServer) -> socket.socket:
    return socket.create_connection(server.address[:2], timeout=WITHIN)


@pytest.mark.parametrize(
    "data",
    [os.urandom(4096), struct.pack("!i", 1 << 30), struct.pack("!i", 64) + b"x", b""],
    ids=["random bytes", "a message too long", "part of a message", "silence"],
)
def test_bad_input_before_authentication_ends_only_its_connection(
    server: HubServer, client: RemoteClient, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_AUTHENTICATES_WITHIN_S", 0.5)
    with raw(server) as sock:
        sock.sendall(data)
        assert put(client, b"meanwhile") == (0, 0)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 16):
                pass


def test_a_wrong_key_is_refused_and_silent_connections_do_not_block_peers(
    server: HubServer, client: RemoteClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_AUTHENTICATES_WITHIN_S", 0.5)
    assert RemoteClient(server.address._replace(key=b"another key")).died
    silent = [raw(server) for _ in range(100)]
    assert within(WITHIN, lambda: not server._unauthenticated._value)
    monkeypatch.undo()  # the late peer has more time
    assert put(client, b"meanwhile") == (0, 0)
    late = RemoteClient(server.address)
    assert late.request(KEY, "status").depth.waiting == 1
    late.close()
    for sock in silent:
        sock.close()


def test_a_peer_that_does_not_read_delays_no_other_peer(server: HubServer, client: RemoteClient) -> None:
    stopped = threading.Event()

    class Stopped(RemoteClient):
        def _receive(self) -> None:
            stopped.wait(WITHIN)

    deaf = Stopped(server.address)
    client.request("", "open", KEY, "name", None, "items")  # takes may come later than puts
    for _ in range(30):
        put(client, b"x" * (1 << 20))
        deaf.ask(KEY, "take", 1, False, 1)
    assert within(WITHIN, lambda: client.request(KEY, "status", timeout=WITHIN).depth.leases == 30)
    deaf.close()
    stopped.set()
    assert within(WITHIN, lambda: client.request(KEY, "status").depth.leases == 0)


def test_a_request_gets_an_answer_if_it_fails_or_its_connection_ends(client: RemoteClient) -> None:
    with pytest.raises(px.errors.InternalError, match="put: TypeError"):
        client.request(KEY, "put")
    assert put(client, b"next") == (0, 0)
    client.request(KEY, "drop", "late", None)
    waiting = [client.ask(KEY, "take", 1, False, 1)[1] for _ in range(3)]
    client.close()
    waiting.append(client.ask(KEY, "status")[1])
    assert {str(future.exception(WITHIN)) for future in waiting} == {"the process that hosts it died"}


def test_a_process_connects_again_if_its_connection_ended(server: HubServer) -> None:
    ended = hubs.remote(server.address)
    ended.close()
    assert within(WITHIN, lambda: hubs.remote(server.address) is not ended)
    hubs.remote(server.address).request("", "meet")
    hubs.remote(server.address).close()


def test_connections_that_end_leave_no_thread_and_no_descriptor(server: HubServer) -> None:
    def threads() -> int:
        return sum(thread.name == "phalanx-hub" for thread in threading.enumerate())

    assert within(WITHIN, lambda: threads() == 1)  # it accepts connections
    before = len(os.listdir("/proc/self/fd"))
    peers = [RemoteClient(server.address) for _ in range(5)]
    assert str(peers[0].ask("another key", "status")[1].exception(WITHIN)) == "it was closed"
    while peers:
        peers.pop().close()
    assert within(WITHIN, lambda: threads() == 1 and len(os.listdir("/proc/self/fd")) <= before)
