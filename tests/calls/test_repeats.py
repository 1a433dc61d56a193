"""Which calls a restart makes again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import phalanx as px
from phalanx.calls.in_flight import InFlightCalls
from phalanx.calls.restart_reruns import RerunLog
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.wire.messages import Message

RANKS = (0, 1)


class Loader(px.Worker):
    """What it loads is loaded again after a restart."""

    @px.register(rerun_on_restart=True)
    def load(self, number: int) -> int:
        return number


@dataclass(eq=False)
class Call:
    """As much of a future as the repeats look at."""

    method: str = "load"
    role: str = ""
    plan: CallPlan = field(default_factory=lambda: CallPlan(RANKS, (), {}, GatherPlan("list", RANKS)))


def sent(name: str) -> list[Message]:
    return [Message(name.encode()) for _ in RANKS]


def to_make(repeats: RerunLog) -> list[bytes]:
    return [entry.sent[0].data for entry in repeats.to_make()]


def add(repeats: RerunLog, name: str, method: str = "load") -> Any:
    call = Call(method)
    repeats.add(call, sent(name))  # pyright: ignore[reportArgumentType]
    return call


def test_of_calls_that_nobody_waits_for_one_of_each_method_is_kept_beside_the_newest() -> None:
    repeats = RerunLog()
    for number in range(50):
        add(repeats, str(number))
        add(repeats, f"other {number}", "warm_up")
    assert len(repeats._entries) == 4
    assert to_make(repeats) == [b"49", b"other 49"]


def test_a_call_that_failed_leaves_the_one_before_it() -> None:
    repeats = RerunLog()
    add(repeats, "good")
    repeats.ended(failed := add(repeats, "bad"), error=ValueError())
    assert to_make(repeats) == [b"good"]
    assert failed is not None


def test_whoever_counts_calls_by_rank_hears_of_the_end_of_one_that_a_restart_makes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(InFlightCalls, "ended", lambda self, call, error: ended.append(call.method))

    with px.ResourcePool([2], use_gpu=False, backend="inline") as pool:
        px.WorkerGroup(pool, Loader).any.load(1)

    assert ended == ["load"]


def test_a_call_whose_future_is_held_is_kept_until_it_ends() -> None:
    repeats = RerunLog()
    first = add(repeats, "first")
    second = add(repeats, "second")
    for call in (second, first):
        repeats.ended(call, error=None if call is first else ValueError())
    assert to_make(repeats) == [b"first"]
