"""Interrupts of calls that are cancelled as they begin, and aborts of collectives."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import socket
import threading
from collections.abc import Generator

import pytest
from torch.distributed import distributed_c10d

import phalanx as px
from phalanx.backends.inline import InlineServices
from phalanx.wire import call_page
from phalanx.wire.failure import RankFailure
from phalanx.worker import rendezvous
from phalanx.worker.control import INTERRUPT_SIGNAL, MARK_VARIABLE, STACKS_SIGNAL, Control, Interrupted
from phalanx.worker.rendezvous import Collectives
from phalanx.worker.worker_runtime import WorkerRuntime
from tests.worker.runtimes import message, runtime_of


class Cancelled:
    """Cancels a call right after the call has checked for cancellation."""

    def __init__(self, control: Control) -> None:
        self._page = control.page
        self._asked = control.page.cancelled
        self.done = False

    def __call__(self, number: int) -> bool:
        answer = self._asked(number)
        if not self.done:
            self.done = True
            call_page.cancel(self._page.fd, number)
            signal.raise_signal(INTERRUPT_SIGNAL)
        return answer


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Generator[Control]:
    """A side channel that lets the test cancel a call while it begins."""
    monkeypatch.setenv(MARK_VARIABLE, "")
    before = signal.getsignal(INTERRUPT_SIGNAL)
    made = Control()
    monkeypatch.setattr(made.page, "cancelled", Cancelled(made))
    yield made
    signal.signal(INTERRUPT_SIGNAL, before)
    faulthandler.unregister(STACKS_SIGNAL)


class Worker(px.Worker):
    def ping(self) -> int:
        return self.rank


@pytest.fixture
def runtime(control: Control, monkeypatch: pytest.MonkeyPatch) -> WorkerRuntime:
    """The runtime of a single rank, as in a process of its own."""
    ids = itertools.count(70000)
    monkeypatch.setattr(InlineServices, "call_id", lambda _: next(ids))
    made = runtime_of(Worker)
    monkeypatch.setattr(made, "_listed", control.listed)
    monkeypatch.setattr(made, "_step", control.step)
    return made


def test_a_call_that_is_cancelled_as_it_begins_is_interrupted_and_the_next_call_runs(
    runtime: WorkerRuntime,
) -> None:
    with pytest.raises(RankFailure) as failure:
        runtime.run(message("ping"))
    assert failure.value.report.kind == "cancelled"
    assert runtime.run(message("ping")) == 0


def test_an_interrupt_that_has_no_effect_is_sent_again(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # restores `cancelled`
    sent: list[int] = []
    kill = signal.pthread_kill

    def unheard_at_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 2:
            kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", unheard_at_first)
    waiting = threading.Event()
    with pytest.raises(Interrupted), control.step(70000):
        call_page.cancel(control.page.fd, 70000)
        os.write(control.describe().control, b"i")
        waiting.wait(60)

    assert sent == [INTERRUPT_SIGNAL] * 3
    assert control.running == 0


def _connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    return server, client, server.accept()[0]


def _open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True


def test_an_abort_ends_process_groups_and_closes_only_their_connections_also_while_they_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collectives, before, nccl = Collectives(), _connected(), threading.Event()
    monkeypatch.setattr(nccl, "abort", nccl.set, raising=False)
    monkeypatch.setitem(distributed_c10d._world.pg_map, nccl, ("nccl", None))
    with collectives.noting():
        of_a_group, of_a_store = _connected(), _connected()
        monkeypatch.setitem(rendezvous._served, of_a_store[0].getsockname()[1], None)
    after = _connected()  # such as one of Ray's, made while the rank works

    collectives.abort()

    assert [_open(one) for one in (*before[1:], *after[1:])] == [True] * 4
    assert [_open(one) for one in of_a_group[1:]] == [False] * 2
    assert (nccl.is_set(), _open(of_a_store[1])) == (True, False)  # the client's end was made for the group
    with collectives.noting():
        under_way = _connected()
        collectives.abort()
        assert not _open(under_way[1])
    for one in itertools.chain(before, of_a_group, of_a_store, after, under_way):
        one.close()
