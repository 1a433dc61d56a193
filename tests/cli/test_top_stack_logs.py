"""Output of `phalanx top`, `stack` and `logs` for given states, without a cluster."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from phalanx.backends.backend_types import ProcessStatus
from phalanx.cli.common import duration, rank_status
from phalanx.cli.rank_commands import by_place
from phalanx.cli.top_command import render
from phalanx.display.registry_records import ChannelRecord, GroupRecord, RankRecord

IDLE = ProcessStatus(True)


def rank(number: int) -> RankRecord:
    return RankRecord(number, "node", "host", 100 + number)


def busy(seconds: float, **more: Any) -> ProcessStatus:
    return ProcessStatus(True, {9: seconds}, methods={9: "actor.update"}, **more)


def shown(*statuses: ProcessStatus, rows: int | None = None, channels: Any = (), **facts: Any) -> str:
    """Return the output of `top` for a group whose ranks have these statuses."""
    ranks = [rank_status(rank(number), status) for number, status in enumerate(statuses)]
    group = GroupRecord("abc123", 1, "trainer", "ready", 0, "pool-1", 1060.0, "Actor")
    run = {"run": "abc123", "script": "train.py", "pid": 7, "host": "head", "started": 1000.0}
    run |= {
        "ended": facts.pop("ended", False),
        "groups": [{**asdict(group), "ranks": ranks, **facts}],
        "channels": [asdict(channel) for channel in channels],
    }
    text = io.StringIO()
    Console(file=text, width=130).print(render({"address": "head:6379", "at": 1120.0, "runs": [run]}, rows))
    return text.getvalue()


def test_a_busy_rank_is_shown_with_its_call_and_its_own_status() -> None:
    text = shown(busy(12.0, status="812 tokens/s"), IDLE, ProcessStatus(False, note="its process has ended"))
    lines = text.splitlines()

    facts = "ready for 60 s, 3 ranks of Actor, pool pool-1"
    parts = ("actor.update 12 s", "idle", facts, "its process has ended")
    assert [part for part in parts if part not in text] == []
    below = next(number for number, line in enumerate(lines) if "update 12 s" in line) + 1
    assert "812 tokens/s" in lines[below]


def test_a_group_shows_its_cause_its_weights_and_the_busiest_ranks_that_fit() -> None:
    statuses = (busy(float(number)) for number in range(9))
    text = shown(*statuses, rows=2, state="broken", cause="rank 1 died", weights={"policy": "complete(7)"})

    assert "cause: rank 1 died" in text
    assert "weights policy complete(7)" in text
    assert [f"update {n}.0 s" in text for n in (6, 7, 8)] == [False, True, True]
    assert "7 more ranks" in text


def test_channels_of_a_run_are_listed_with_their_counts_and_missing_drivers_are_reported() -> None:
    channel = ChannelRecord("abc123", "rollouts", "8 items", 3, 2048, 1, 0, 2, 40, 0, 5, 12.5, 1119.0, 1100.0)

    line = next(line for line in shown(channels=[channel]).splitlines() if "rollouts" in line)
    assert " ".join(line.split()) == "rollouts 8 items 3 2.0 KiB 20 s 1 0 2 12.5 0 5"
    assert "train.py  its driver has ended" in shown(ended=True)
    assert "no driver of Phalanx" in str(render({"address": "head:6379", "at": 0.0, "runs": []}))


def test_running_calls_have_readable_names_and_the_longest_call_is_first() -> None:
    methods = {1: "actor.__phalanx_run__", 2: "update", 3: ""}
    status = ProcessStatus(True, {1: 0.5, 2: 3.0, 3: 1.0}, methods=methods)

    calls = [tuple(call.values()) for call in rank_status(rank(0), status)["doing"]]
    assert calls == [("update", 3.0), ("a call", 1.0), ("actor.run(...)", 0.5)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0.0 s"), (0.44, "0.4 s"), (12.3, "12 s"), (200, "3 min"), (7500, "2 h 5 min")]
)
def test_durations_have_readable_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranks_with_the_same_stack_are_shown_together() -> None:
    waits = ProcessStatus(True, {9: 2.0}, stack='File "a.py", line 3 in wait', methods={9: "update"})
    stands = ProcessStatus(True, stack='File "b.py", line 1 in loop')
    gone = ProcessStatus(False, note="its process has ended")

    data = [rank_status(rank(number), status) for number, status in enumerate([waits, stands, waits, gone])]

    assert by_place(data) == [
        ("ranks 0, 2 (host host): at update for 2.0 s", '  File "a.py", line 3 in wait'),
        ("rank 1 (host host, pid 101): idle", '  File "b.py", line 1 in loop'),
        ("rank 3 (host host, pid 103): cannot be reached", "  its process has ended"),
    ]
