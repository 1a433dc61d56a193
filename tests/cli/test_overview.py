"""What `phalanx top`, `stack` and `logs` make of what was seen. Without a cluster."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from phalanx.backends.backend_types import ProcessStatus
from phalanx.backends.ray.usage import Gpu, Usage, read_gpus
from phalanx.cli.logs_command import Line, Order, merged
from phalanx.cli.overview import GroupNow, Overview, RankNow, doing, duration, rank_now, render
from phalanx.cli.stack_command import alike
from phalanx.display.registry_records import ChannelEntry, GroupRecord, RankRecord, RunRecord

GIB = 2**30
RUN = RunRecord("abc123", "01", 7, "head", 1000.0, "train.py", "0.1.0")


def rank(number: int, accelerator: str | None = None) -> RankRecord:
    return RankRecord(number, "node", "host", 100 + number, accelerator)


def group(state: str = "ready", ranks: int = 2, cause: str | None = None) -> GroupRecord:
    entries = tuple(rank(number) for number in range(ranks))
    return GroupRecord(
        "abc123", 1, "trainer", state, 0, "pool-1", 1060.0, label="Actor", cause=cause, ranks=entries
    )


def shown(group: GroupRecord, nows: list[RankNow], rows: int | None = None) -> str:
    overview = Overview("head:6379", 1120.0, (RUN,), (GroupNow(group, tuple(nows)),))
    text = io.StringIO()
    Console(file=text, width=110).print(render(overview, rows))
    return text.getvalue()


def test_what_a_rank_does_is_shown_with_how_long() -> None:
    sight = ProcessStatus(True, {9: 12.0}, methods={9: "actor.update"})
    now = rank_now(rank(0), sight, Usage(GIB, 10.0, 50.0), Usage(2 * GIB, 11.0, 52.0), None)

    text = shown(group(), [now, RankNow(rank(1), memory=GIB // 2)])

    assert "actor.update 12 s" in text
    assert "2.0 GiB" in text
    assert "50%" in text
    assert "idle" in text
    assert "ready for 60 s, 2 ranks of Actor" in text


def test_a_rank_that_cannot_be_reached_says_why() -> None:
    now = rank_now(rank(0), ProcessStatus(False, note="its process is gone"), None, None, None)

    assert "its process is gone" in shown(group(ranks=1), [now])


def test_what_a_rank_says_of_itself_stands_below_what_it_does() -> None:
    now = rank_now(
        rank(0), ProcessStatus(True, {9: 1.0}, methods={9: "generate"}, told="812 tokens/s"), None, None, None
    )

    lines = shown(group(ranks=1), [now]).splitlines()

    below = next(number for number, line in enumerate(lines) if "generate 1.0 s" in line) + 1
    assert "812 tokens/s" in lines[below]


def test_a_broken_group_shows_its_cause() -> None:
    assert "cause: rank 1 died" in shown(group("broken", cause="rank 1 died"), [])


def test_where_not_all_ranks_fit_the_busiest_are_shown() -> None:
    ranks = [RankNow(rank(number), doing=(("update", float(number)),)) for number in range(9)]

    text = shown(group(ranks=9), ranks, rows=2)

    assert ("update 7.0 s" in text, "update 8.0 s" in text, "update 6.0 s" in text) == (True, True, False)
    assert "7 more ranks" in text


def test_a_cluster_without_drivers_says_so() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(render(Overview("head:6379", 0.0, (), ())))

    assert "no driver of Phalanx" in text.getvalue()


def test_the_same_is_there_as_data() -> None:
    now = RankNow(rank(0, "3"), doing=(("update", 1.5),), memory=5, cpu=98.0, use=40.0)
    data = Overview("head:6379", 0.0, (RUN,), (GroupNow(group(), (now,)),)).to_dict()

    found = data["runs"][0]["groups"][0]["ranks"][0]
    assert found["doing"] == [{"method": "update", "seconds": 1.5}]
    assert (found["accelerator"], found["memory_bytes"], found["gpu_percent"]) == ("3", 5, 40.0)


def test_calls_are_named_as_people_know_them_the_longest_first() -> None:
    sight = ProcessStatus(
        True, {1: 0.5, 2: 3.0, 3: 1.0}, methods={1: "actor.__phalanx_run__", 2: "update", 3: ""}
    )

    assert doing(sight) == (("update", 3.0), ("a call", 1.0), ("actor.run(...)", 0.5))


def test_the_use_of_an_accelerator_is_that_of_the_ranks_own() -> None:
    gpus = [Gpu("0", "GPU-a", 10.0, 0, 1), Gpu("1", "GPU-b", 90.0, 0, 1)]

    uses = [
        rank_now(rank(0, ids), ProcessStatus(True), None, None, gpus).use
        for ids in ("0", "1", "GPU-b", "0,1", None)
    ]
    assert uses == [10.0, 90.0, 90.0, 90.0, None]


def test_what_nvidia_smi_prints_is_read() -> None:
    text = "0, GPU-5a, 37, 1024, 81559\n1, GPU-5b, [N/A], 0, 81559\n\nnonsense\n"

    assert read_gpus(text) == [
        Gpu("0", "GPU-5a", 37.0, 1024 * 2**20, 81559 * 2**20),
        Gpu("1", "GPU-5b", None, 0, 81559 * 2**20),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.44, "0.4 s"), (12.3, "12 s"), (200, "3 min"), (7500, "2 h 5 min")],
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranks_at_the_same_place_are_shown_together() -> None:
    ranks = [rank(number) for number in range(4)]
    waits = ProcessStatus(True, {9: 2.0}, stack='File "a.py", line 3 in wait', methods={9: "update"})
    stands = ProcessStatus(True, stack='File "b.py", line 1 in loop')

    found = alike(ranks, [waits, stands, waits, ProcessStatus(False, note="its process is gone")])

    assert found == [
        ("ranks 0, 2 (host host): at update for 2.0 s", '  File "a.py", line 3 in wait'),
        ("rank 1 (host host, pid 101): idle", '  File "b.py", line 1 in loop'),
        ("rank 3 (host host, pid 103): cannot be reached", "  its process is gone"),
    ]


def lines(number: int, *pairs: tuple[str, str]) -> list[Line]:
    return [Line(number, "", text, at) for at, text in pairs]


BY_RANK = [
    lines(0, ("10:00", "a"), ("10:00", "a2"), ("10:03", "d")),
    lines(1, ("10:01", "b"), ("10:02", "c")),
]


@pytest.mark.parametrize(
    ("order", "tail", "texts"),
    [
        (Order.RANK, None, ["a", "a2", "d", "b", "c"]),
        (Order.TIME, None, ["a", "a2", "b", "c", "d"]),
        (Order.RANK, 1, ["d", "c"]),
        (Order.RANK, 0, []),
        (Order.TIME, 1, ["c", "d"]),
    ],
)
def test_lines_of_several_ranks_are_put_together(order: Order, tail: Any, texts: list[str]) -> None:
    assert [line.text for line in merged(BY_RANK, order, tail)] == texts


def test_channels_of_a_run_are_listed_with_what_waits() -> None:
    channel = ChannelEntry("abc123", "rollouts", "8 items", 3, 2048, 1, 0, 2, 40, 0, 5, 12.5, 1119.0, 1100.0)
    text = io.StringIO()
    Console(file=text, width=130).print(render(Overview("head:6379", 1120.0, (RUN,), (), (channel,))))
    line = next(line for line in text.getvalue().splitlines() if "rollouts" in line)
    assert line.split() == [
        "rollouts",
        "8",
        "items",
        "3",
        "2.0",
        "KiB",
        "20",
        "s",
        "1",
        "0",
        "2",
        "12.5",
        "0",
        "5",
    ]


def test_a_group_says_of_which_version_its_weights_are() -> None:
    entry = replace(group(), weights={"policy": "whole(7)"})

    assert "weights policy whole(7)" in shown(entry, [RankNow(rank(0))])
