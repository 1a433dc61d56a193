"""Output of ranks: complete lines and tracebacks, with the prefix of their ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phalanx.display.log_merging import HEADER, Lines, Merged, prefix_of

TRACEBACK = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad\n'


def test_the_prefix_names_label_rank_and_host() -> None:
    assert prefix_of("actor", [3], ["node7"]) == "[actor r3@node7] "


def test_complete_lines_are_returned_except_for_control_lines() -> None:
    lines = Lines(lambda *_: b"")

    assert lines.feed(b"one\ntw") == ["one"]
    assert lines.feed(b"o\n") == ["two"]
    for mark in (HEADER + "rank 3 of 8", ":actor_name:A", ":job_id:01000000"):
        assert lines.feed(f"{mark}\nvisible\n".encode()) == ["visible"]


def test_a_traceback_is_returned_once_complete_or_after_several_empty_reads() -> None:
    lines = Lines(lambda *_: b"")
    first, second = TRACEBACK[:60], TRACEBACK[60:]

    assert lines.feed(b"before\n" + first) == ["before"]
    assert lines.feed(second) == TRACEBACK.decode().splitlines()
    assert lines.feed(b"Traceback (most recent call last):\n  File\n") == []
    given = [line for _ in range(20) for line in lines.feed(b"")]
    assert given == ["Traceback (most recent call last):", "  File"]


def test_only_the_last_state_of_a_progress_bar_is_kept_and_returned() -> None:
    lines = Lines(lambda *_: b"")
    held = [lines.feed(b"%d %%\r" % percent) for percent in range(100)]

    assert (held, len(lines._rest)) == ([[]] * 100, len("99 %\r"))
    assert lines.feed(b"100 %\ndone\r\n") == ["100 %", "done"]


@given(st.text(alphabet="ab \né", max_size=60), st.integers(1, 7))
def test_every_line_is_returned_once_and_in_order_for_any_size_of_chunks(text: str, size: int) -> None:
    data = text.encode()
    lines = Lines(lambda *_: b"")
    given = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])]

    assert "\n".join([*given, *lines.finish()]) == text.removesuffix("\n")


def merged(*said: tuple[int, str]) -> Merged:
    made = Merged("actor", ["a", "a", "b"], 1.0)
    for rank, line in said:
        made.add(rank, line.split("\n"), now=0.0)
    return made


def test_equal_lines_of_several_ranks_are_merged_into_one_line_with_their_ranks() -> None:
    assert merged((0, "ready"), (1, "ready"), (2, "rank 2")).take(None) == [
        "[actor r0-1@a] ready",
        "[actor r2@b] rank 2",
    ]
    assert merged((0, "ready"), (2, "ready")).take(None) == ["[actor r0,2@2 hosts] ready"]


def test_a_line_waits_a_limited_time_for_equal_lines_and_is_shown_once() -> None:
    lines = Merged("actor", ["a", "a"], 1.0)
    lines.add(0, ["later"], now=2.0)
    lines.add(1, ["sooner"], now=1.0)  # out of order

    assert lines.take(1.9) == []
    assert lines.take(2.0) == ["[actor r1@a] sooner"]
    assert [lines.take(None), lines.take(None)] == [["[actor r0@a] later"], []]


def test_different_tracebacks_are_not_interleaved() -> None:
    first, second = TRACEBACK.decode().rstrip(), TRACEBACK.decode().rstrip().replace("bad", "worse")

    shown = merged((0, first), (1, second), (2, first)).take(None)

    assert [line.partition("] ")[2] for line in shown] == [*first.split("\n"), *second.split("\n")]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc")), max_size=30))
def test_merging_loses_no_line(said: list[tuple[int, str]]) -> None:
    shown = merged(*said).take(None)

    names = (("r0@", "r0-", "r0,"), ("r1@", "r0-1", "r1-", "r0-2", "r1,"), ("r2@", "-2@", ",2@"))
    for rank, letter in itertools.product(range(3), "abc"):
        of_letter = [line for line in shown if line.endswith(letter)]
        of_rank = [line for line in of_letter if any(part in line for part in names[rank])]
        assert len(of_rank) == said.count((rank, letter))
