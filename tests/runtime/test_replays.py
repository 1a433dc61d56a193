"""Which calls a restart makes again, without any ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.runtime.calls.repeats import Replays
from phalanx.wire.messages import Message

RANKS = (0, 1)


@dataclass(eq=False)
class Call:
    """As much of a future as the replays look at."""

    method: str = "load"
    role: str = ""
    plan: CallPlan = field(default_factory=lambda: CallPlan(RANKS, (), {}, GatherPlan("list", RANKS)))


def sent(name: str) -> list[Message]:
    return [Message(name.encode()) for _ in RANKS]


def to_make(replays: Replays) -> list[bytes]:
    return [entry.sent[0].data for entry in replays.to_make()]


def add(replays: Replays, name: str, method: str = "load") -> Any:
    call = Call(method)
    replays.add(call, sent(name))  # pyright: ignore[reportArgumentType]
    return call


def test_of_calls_that_nobody_waits_for_one_of_each_method_is_kept_beside_the_newest() -> None:
    replays = Replays()
    for number in range(50):
        add(replays, str(number))
        add(replays, f"other {number}", "warm_up")
    assert len(replays._entries) == 4
    assert to_make(replays) == [b"49", b"other 49"]


def test_a_call_that_failed_leaves_the_one_before_it() -> None:
    replays = Replays()
    add(replays, "good")
    replays.ended(failed := add(replays, "bad"), succeeded=False)
    assert to_make(replays) == [b"good"]
    assert failed is not None


def test_a_call_whose_future_is_held_is_kept_until_it_ends() -> None:
    replays = Replays()
    first = add(replays, "first")
    second = add(replays, "second")
    for call in (second, first):
        replays.ended(call, succeeded=call is first)
    assert to_make(replays) == [b"first"]
