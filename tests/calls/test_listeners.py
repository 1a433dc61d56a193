"""Listeners of calls: which steps they hear, and what becomes of a listener that raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.calls.listeners import CallInfo, CallListener, everywhere


class Ends(CallListener):
    """Counts the calls that end, and notes the numbers of those that somebody waits for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self.asked_for: list[int] = []
        self._error = error

    def asked(self, call: CallInfo) -> None:
        self.asked_for.append(call.number)

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        self.count += 1
        if self._error is not None:
            raise self._error


class Echo(px.Worker):
    @px.register
    def give(self, value: int) -> int:
        return value


@pytest.fixture
def group() -> Iterator[Any]:
    before = list(everywhere.all)
    with px.ResourcePool([1], use_gpu=False, backend="inline") as pool:
        yield px.WorkerGroup(pool, Echo)
    for listener in set(everywhere.all) - set(before):
        everywhere.remove(listener)


def test_calls_are_heard_to_be_asked_for_and_to_end_by_those_who_were_there_when_they_were_planned(
    group: Any,
) -> None:
    everywhere.add(early := Ends())
    futures = [group.give.submit(1), group.give.submit(2)]
    everywhere.add(late := Ends())

    px.gather(*futures)

    assert early.asked_for == [future.call.number for future in futures]
    assert (early.count, late.count, late.asked_for) == (2, 0, [])


def test_a_listener_that_raises_is_removed_and_reported_once_and_the_call_goes_on(
    group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    everywhere.add(bad := Ends(RuntimeError("out of ink")))
    everywhere.add(good := Ends())
    futures = [group.give.submit(number) for number in range(3)]

    with caplog.at_level(logging.WARNING, "phalanx"):
        values = [future.result() for future in futures]

    assert (values, good.count) == ([[0], [1], [2]], 3)
    assert [record.message for record in caplog.records] == [
        "Ends raised RuntimeError: out of ink, and hears of no further calls"
    ]
    assert bad not in everywhere.all
