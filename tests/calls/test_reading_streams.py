"""Fetching items of streams: small items of unbounded streams are fetched several at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from tests.conformance.test_groups import Unreadable


class Source(px.Worker):
    @px.register
    def numbers(self, n: int) -> Iterator[int]:
        for index in range(n):
            yield 100 * self.rank + index

    @px.register
    def blobs(self, n: int) -> Iterator[bytes]:
        for _ in range(n):
            yield bytes(1 << 20)

    @px.register
    def unreadable(self, n: int) -> Iterator[Any]:
        yield from range(n)
        yield Unreadable()
        yield from range(n)


@pytest.fixture
def group(here: px.ResourcePool) -> Any:
    return px.WorkerGroup(here[:2], Source)


@pytest.fixture
def fetches(group: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items in each fetch, as on a backend whose items arrive before they are taken."""
    sizes: list[int] = []
    backend = group.core.backend
    fetch = backend.fetch
    monkeypatch.setattr(backend, "immediate", False)
    monkeypatch.setattr(
        backend, "fetch", lambda refs, *more: (sizes.append(len(refs)), fetch(refs, *more))[1]
    )
    return sizes


@pytest.mark.parametrize(
    ("method", "buffer", "together"),
    [("numbers", None, True), ("numbers", 8, False), ("blobs", None, False)],
    ids=["small items", "small items of ranks that wait for their reader", "large items"],
)
def test_only_small_items_of_unbounded_streams_are_fetched_several_at_a_time(
    group: Any, fetches: list[int], method: str, buffer: int | None, together: bool
) -> None:
    items = list(getattr(group[1], method).stream(100 if method == "numbers" else 5, buffer=buffer))

    assert method == "blobs" or items == list(range(100, 200))
    assert 0 < len(fetches) < 20 if together else set(fetches) == {1}


def test_an_unreadable_item_raises_after_the_items_before_it(group: Any, fetches: list[int]) -> None:
    items: list[int] = []
    with pytest.raises(px.RemoteCallError, match="unpickled"):
        items.extend(group[0].unreadable.stream(4, buffer=None))

    assert items == [0, 1, 2, 3]


def test_reads_that_time_out_share_one_waiting_thread(
    group: Any, fetches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, arrived, waiting = group.core.backend, threading.Event(), list[threading.Thread]()
    wait = backend.wait

    def late(refs: list[Any], count: int, timeout: float | None) -> Any:
        if timeout != 0:
            waiting.append(threading.current_thread())
            arrived.wait()
        return wait(refs, count, timeout) if arrived.is_set() else ([], list(range(len(refs))))

    async def read() -> int:
        items = group[0].numbers.stream(1)
        monkeypatch.setattr(backend, "wait", late)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(items), 0.05)
        arrived.set()
        return await anext(items)

    assert asyncio.run(read()) == 0
    assert len(waiting) == 1
