"""Who hears of calls, and what becomes of a listener that raises."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import phalanx as px
from phalanx.calls.listeners import STEPS, CallInfo, CallListener, Listeners, everywhere
from tests.calls.fake_ranks import call_on, group_of


class Ends(CallListener):
    """Hears of ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self._error = error

    def ended(self, call: CallInfo, error: BaseException | None) -> None:
        self.count += 1
        if self._error is not None:
            raise self._error


def test_a_listener_is_told_only_of_steps_that_it_overrides() -> None:
    listeners = Listeners()
    before = [step for step in STEPS if getattr(listeners.heard, step)]
    listeners.add(Ends())

    assert (before, [step for step in STEPS if getattr(listeners.heard, step)]) == ([], ["ended"])


class Asked(CallListener):
    """Notes the numbers of calls that somebody waits for."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def asked(self, call: CallInfo) -> None:
        self.numbers.append(call.number)


class Echo(px.Worker):
    @px.register
    def give(self, value: int) -> int:
        return value


def test_calls_that_are_waited_for_together_are_each_heard_to_be_asked_for() -> None:
    with px.ResourcePool([1], use_gpu=False, backend="inline") as pool:
        group: Any = px.WorkerGroup(pool, Echo)
        everywhere.add(asked := Asked())
        futures = [group.give.submit(1), group.give.submit(2)]

        px.gather(*futures)
        everywhere.remove(asked)

    assert asked.numbers == [future.call.number for future in futures]


def test_a_call_is_heard_by_those_who_were_there_when_it_was_planned() -> None:
    listeners = Listeners()
    call = call_on(group_of(1), 1, listeners=listeners)
    listeners.add(late := Ends())

    call.result(None)

    assert late.count == 0


def test_a_listener_that_raises_is_removed_and_reported_once_and_the_call_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listeners = Listeners()
    listeners.add(bad := Ends(RuntimeError("out of ink")))
    listeners.add(good := Ends())
    calls = [call_on(group_of(1), number, listeners=listeners) for number in range(3)]

    with caplog.at_level(logging.WARNING, "phalanx"):
        values = [call.result(None) for call in calls]

    assert values == [[0], [1], [2]]
    assert good.count == 3
    assert [record.message for record in caplog.records] == [
        "Ends raised RuntimeError: out of ink, and hears of no further calls"
    ]
    assert bad not in listeners.all
