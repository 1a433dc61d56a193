"""Which calls a restart makes again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import phalanx as px
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
    """As much of a future as the log looks at."""

    method: str = "load"
    role: str = ""
    plan: CallPlan = field(default_factory=lambda: CallPlan(RANKS, (), {}, GatherPlan("list", RANKS)))


def sent(name: str) -> list[Message]:
    return [Message(name) for _ in RANKS]


def to_make(log: RerunLog) -> list[str]:
    return [entry.sent[0].name for entry in log.to_make()]


def add(log: RerunLog, name: str, method: str = "load") -> Any:
    call = Call(method)
    log.add(call, sent(name))  # pyright: ignore[reportArgumentType]
    return call


def test_of_calls_that_nobody_waits_for_one_of_each_method_is_kept_beside_the_newest() -> None:
    log = RerunLog()
    for number in range(50):
        add(log, str(number))
        add(log, f"other {number}", "warm_up")
    assert len(log.entries) == 4
    assert to_make(log) == ["49", "other 49"]


def test_a_call_that_failed_leaves_the_one_before_it() -> None:
    log = RerunLog()
    add(log, "good")
    log.ended(failed := add(log, "bad"), error=ValueError())
    assert to_make(log) == ["good"]
    assert failed is not None


def test_a_call_of_any_rank_that_a_restart_makes_again_is_not_counted_once_it_has_ended() -> None:
    with px.ResourcePool([2], use_gpu=False, backend="inline") as pool:
        group = px.WorkerGroup(pool, Loader)
        group.any.load(1)

        assert not group.core.chosen


def test_a_call_whose_future_is_held_is_kept_until_it_ends() -> None:
    log = RerunLog()
    first = add(log, "first")
    second = add(log, "second")
    for call in (second, first):
        log.ended(call, error=None if call is first else ValueError())
    assert to_make(log) == ["first"]
