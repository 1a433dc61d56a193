"""Items of ranks that are values, read in turn: small ones of ranks that nobody holds back come several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from phalanx.backends.backend_types import FetchFailed, RankOutcome
from phalanx.calls.call_state import PendingStream, Streaming
from phalanx.calls.item_stream import Reader
from phalanx.wire.failure import capture
from phalanx.wire.messages import StreamEnd

Ref = tuple[int, int]  # rank and index


@dataclass
class Made:
    """What a rank has made; all of it is there."""

    rank: int
    count: int
    ended: str = "ended"
    taken: int = 0

    @property
    def coming(self) -> Made:
        return self

    def take(self) -> Ref | None:
        if self.taken == self.count:
            return None
        self.taken += 1
        return self.rank, self.taken - 1

    def leave(self) -> None:
        pass


@dataclass
class Items:
    """Gives values by reference, and counts how it is asked. Exceptions cannot be had."""

    values: Sequence[Sequence[Any]]
    immediate: bool = False
    asked: list[int] = field(default_factory=list[int])

    def now(self) -> float:
        return 0.0

    def wait(self, refs: Sequence[Any], count: int, timeout: float | None) -> tuple[list[int], list[int]]:
        return list(range(len(refs))), []

    def fetch(self, refs: Sequence[Ref], timeout: float | None = None) -> list[Any]:
        self.asked.append(len(refs))
        found = [self.values[rank][index] for rank, index in refs]
        if any(isinstance(one, Exception) for one in found):
            raise FetchFailed
        return found

    def outcome(self, ref: Ref) -> RankOutcome:
        value = self.values[ref[0]][ref[1]]
        return (
            RankOutcome(failure=capture(value, rank=ref[0]))
            if isinstance(value, Exception)
            else RankOutcome(value)
        )


def reader(values: Sequence[Sequence[Any]], buffer: int | None) -> tuple[Reader, Items]:
    transport = Items(values)
    streams: Any = [Made(rank, len(items)) for rank, items in enumerate(values)]
    given: Any = transport
    arrivals = PendingStream(given, streams, Streaming(frozenset(range(len(values))), buffer))
    return Reader(arrivals, given), transport


def read(one: Reader) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    while (item := one.take(None)) is not None:
        if type(item[1]) is not StreamEnd:
            found.setdefault(item[0], []).append(item[1])
    return found


def made(rank: int, count: int) -> list[Any]:
    return [*(100 * rank + index for index in range(count)), StreamEnd(count)]


@pytest.mark.parametrize("buffer", [None, 8])
def test_every_item_of_each_rank_comes_once_and_in_order(buffer: int | None) -> None:
    one, _ = reader([made(rank, 50 + rank) for rank in range(3)], buffer)

    assert read(one) == {rank: made(rank, 50 + rank)[:-1] for rank in range(3)}


@pytest.mark.parametrize(
    ("items", "buffer", "together"),
    [
        (made(0, 100), None, True),
        (made(0, 100), 8, False),
        ([*[bytes(1 << 20)] * 5, StreamEnd(5)], None, False),
    ],
    ids=["small items", "of ranks that wait for their reader", "large items"],
)
def test_small_items_of_ranks_that_nobody_holds_back_are_fetched_several_at_a_time(
    items: list[Any], buffer: int | None, together: bool
) -> None:
    one, transport = reader([items], buffer)
    read(one)

    assert len(transport.asked) < 20 if together else set(transport.asked) == {1}


def test_an_item_that_cannot_be_had_fails_in_its_turn() -> None:
    one, _ = reader([[0, 1, 2, 3, ValueError("lost"), 5, StreamEnd(6)]], None)

    assert [one.take(None) for _ in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    with pytest.raises(FetchFailed):
        one.take(None)
