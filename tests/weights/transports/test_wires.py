"""The sockets between the ends of a ring."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from phalanx.errors import WeightsTransferError
from phalanx.weights.transports.deadline import Deadline
from phalanx.weights.transports.message_socket import Message, MessageSocket


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def above(number: int, one: socket.socket) -> socket.socket:
    """The same connection under a high file descriptor, as where many files are open."""
    with one:
        return socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, number))


@pytest.mark.usefixtures("many_files")
def test_wires_wait_also_where_many_files_are_open() -> None:
    here, there = (above(1500, one) for one in socket.socketpair())
    wire, other = MessageSocket(here, "source rank 0"), MessageSocket(there, "target rank 0")
    note = bytes(8 << 20)
    sender = threading.Thread(target=other.tell_note, args=(note, Deadline(20.0)))
    sender.start()

    assert wire.ask_note(Deadline(20.0)) == note
    sender.join()
    with pytest.raises(WeightsTransferError, match="target rank 0"):
        other.ask(Deadline(0.05))
    wire.close()
    other.close()


def test_a_peer_that_hangs_up_is_named() -> None:
    here, there = socket.socketpair()
    wire = MessageSocket(here, "source rank 3")
    there.close()

    with pytest.raises(WeightsTransferError, match="source rank 3 went away"):
        wire.tell(Message(b"HELO"))
        wire.ask(Deadline(5.0))
    wire.close()
