"""A head of relays sends in the order of the numbers that it is given, and waits for one that it was not given."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from phalanx.topology import relays as planned
from phalanx.topology.relays import RelayTree
from phalanx.transport.ray.relay import Below, Relay
from phalanx.transport.ray.relays import RayRelays
from phalanx.wire.relayed import Batch, Envelope, Gone


class Head:
    """Notes the numbers; two threads that come at once meet while it does."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._both = threading.Barrier(2)
        self.forward = self.forget = self

    def remote(self, number: int, *_: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._both.wait(0.2)
        self.numbers.append(number)


def test_no_number_is_given_twice_by_threads_that_send_at_once() -> None:
    relays, head = RayRelays(RelayTree((), 0), (), connected=lambda: True), Head()
    relays._heads, relays._sequences = [head], [0]  # as of a tree with one

    with ThreadPoolExecutor(2) as threads:
        sent = [
            threads.submit(relays.send, 0, Envelope(0, "", "add", 1, None, [(b"", ())], None, []), ()),
            threads.submit(relays.forget, 0, [1]),
        ]
        for one in sent:
            one.result()

    assert head.numbers == [0, 1]


def test_a_head_of_which_nobody_knows_whether_it_has_its_number_counts_as_gone() -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    relays = RayRelays(RelayTree((), 0), (), connected=lambda: True)
    relays.tree = RelayTree((planned.Relay("node", (0,)),), 1)
    relays._heads, relays._sequences = [SimpleNamespace(forward=SimpleNamespace(remote=interrupted))], [0]
    relays._names = ["relay 0 of ranks 0"]

    with pytest.raises(KeyboardInterrupt):
        relays.send(0, Envelope(0, "", "add", 1, None, [(b"", ())], None, []), ())

    assert relays.gone() == relays.gone(0) == Gone("relay 0 of ranks 0", "sending to it was interrupted")


class Lower:
    """A relay below another one: notes which calls it is told to forget, and by what kind of message."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str, Sequence[int]]] = []
        self.forward = SimpleNamespace(remote=self._forward)
        self.forget = SimpleNamespace(remote=self._noting("forget"))

    def _noting(self, kind: str) -> Callable[[int, Sequence[int]], None]:
        return lambda number, serials: self.told.append((number, kind, list(serials)))

    def _forward(self, number: int, data: bytes, *_: object) -> None:
        self.told.append((number, "forward", list(Envelope.unpack(data).over)))


def test_those_below_are_told_what_is_over_with_a_call_or_at_once_where_it_does_not_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    monkeypatch.setattr("phalanx.transport.ray.relay._ToRelays.collect", lambda _: Batch(1, [b"x"]))
    first, second = Lower(), Lower()
    head = Relay(Below("head", (0, 1), [], [("a", first, (0,)), ("b", second, (1,))], niceness=20))
    everyone = Envelope(0, "", "add", 1, None, [(b"", ())], None)

    async def calls() -> None:
        await head.forward(0, everyone.pack())
        await head.forward(1, everyone._replace(serial=1, ranks=[0], over=[0]).pack())
        await head.forget(2, [1])

    asyncio.run(calls())

    assert first.told == [(0, "forward", []), (1, "forward", [0]), (2, "forget", [1])]
    assert second.told == [(0, "forward", []), (1, "forget", [0]), (2, "forget", [1])]
    assert not head._calls
