"""A head of relays sends in the order of the numbers that it is given, and waits for one that it was not given."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from phalanx.topology.relays import RelayTree
from phalanx.transport.ray.relays import RayRelays
from phalanx.wire.relayed import Envelope


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
