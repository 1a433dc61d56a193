"""What a rank writes of a trace, and what is read of it when the rank is gone."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from pathlib import Path

import pytest

from phalanx.tracing.events import Trace
from phalanx.tracing.recorder import TracedEpoch, merge
from phalanx.tracing.spans import Noted, SpanLog, SpanWriter, path_of, process, read_log, span
from tests.tracing.made_up import key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(path_of(str(tmp_path / "rank-0"), "abc"))


def reading(path: Path) -> SpanLog:
    return read_log(path.read_bytes().splitlines(), key(0))


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_is_written_from_beginning_to_end(path: Path, waits: bool) -> None:
    with Noted(SpanWriter(str(path)), 5, waits=waits) as note:
        note.started(100)
        note.finished()
        note.returned(40)
    part = reading(path).parts[5]

    assert (part.argument_bytes, part.result_bytes, part.error) == (100, 40, None)
    times = (part.received, part.started, part.finished, part.returned)
    assert list(times) == sorted(times)  # type: ignore[type-var]


@pytest.mark.parametrize("waits", [True, False])
def test_an_error_is_written_with_the_call(path: Path, waits: bool) -> None:
    with pytest.raises(ValueError), Noted(SpanWriter(str(path)), 5, waits=waits) as note:
        note.started(0)
        raise ValueError("no\nsecond line")

    assert reading(path).parts[5].error == "ValueError: no"


@pytest.mark.parametrize("waits", [True, False])
def test_a_call_that_fails_before_its_arguments_are_there_did_not_run(path: Path, waits: bool) -> None:
    with pytest.raises(ValueError), Noted(SpanWriter(str(path)), 5, waits=waits):
        raise ValueError

    part = reading(path).parts[5]
    assert (part.started, part.finished, part.error) == (None, None, "ValueError")
    assert part.returned is not None


def test_a_call_that_has_to_wait_for_arguments_is_written_at_once(path: Path) -> None:
    with Noted(SpanWriter(str(path)), 5, waits=True):
        assert reading(path).parts[5].received is not None


def test_what_was_written_before_a_process_ends_can_be_read(path: Path) -> None:
    def begin() -> None:
        note = Noted(SpanWriter(str(path)), 5).__enter__()
        note.started(7)
        span("step").__enter__()

    contextvars.copy_context().run(begin)  # it is never left

    found = reading(path)
    assert found.parts[5].started is not None
    assert found.parts[5].returned is None
    assert [(one.name, one.call, one.ended) for one in found.spans] == [("step", 5, None)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_off_is_left_out(path: Path, cut: int) -> None:
    journal = SpanWriter(str(path))
    for number in (1, 2):
        with Noted(journal, number) as note:
            note.started(0)
    path.write_bytes(path.read_bytes()[:-cut])

    assert reading(path).parts[1].returned is not None


def test_lines_of_other_kinds_and_of_unknown_calls_are_passed_over() -> None:
    lines = [
        b'["later version", 1]',
        b"{}",
        b'["run", 9, 1, 1]',
        b'["leave", 9, 1, null]',
        b"\xff",
        b'["in", 1, 3, "", "m"]',
    ]

    assert read_log(lines, key(0)).parts.keys() == {1}


def test_a_journal_that_cannot_be_written_says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "phalanx"):
        journal = SpanWriter(str(tmp_path / "file" / "rank-0.events"))
        journal.write("in", 1)
        journal.write("in", 2)

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "this process's part of the trace is lost"
    ]


def test_a_journal_does_not_fill_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.tracing.spans._LIMIT", 200)
    journal = SpanWriter(str(path))
    for number in range(100):
        with Noted(journal, number):
            pass

    assert reading(path).full
    assert path.stat().st_size < 300


def test_a_span_in_a_call_lies_in_it_and_one_outside_on_the_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SpanWriter(str(path))
    monkeypatch.setattr(process, "sink", journal)
    with Noted(journal, 5), span("inside", rows=3):
        thread = threading.Thread(target=lambda: span("beside")(lambda: None)())
        thread.start()
        thread.join()

    assert [(one.name, one.call, one.attributes) for one in reading(path).spans] == [
        ("inside", 5, {"rows": 3}),
        ("beside", None, {}),
    ]


def test_a_span_keeps_the_error_that_left_it(path: Path) -> None:
    journal = SpanWriter(str(path))
    with pytest.raises(KeyError), Noted(journal, 5), span("step"):
        raise KeyError("x")

    assert reading(path).spans[0].error == "KeyError: 'x'"


def test_attributes_that_json_does_not_know_become_text(path: Path) -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with (
        Noted(SpanWriter(str(path)), 5),
        span("step", shape=(2, 3), odd=Odd(), none=None, loss=float("nan")),
    ):
        pass

    found = reading(path).spans[0].attributes
    assert found == {"shape": "(2, 3)", "odd": "<Odd: RuntimeError: no text>", "none": None, "loss": "nan"}


def test_a_decorated_function_is_a_span_each_time(path: Path) -> None:
    @span("score")
    def score(x: int) -> int:
        """Doc."""
        return score(x - 1) + 1 if x else 0

    @span("ask")
    async def ask() -> int:
        return 7

    with Noted(SpanWriter(str(path)), 5):
        assert (score(2), asyncio.run(ask())) == (2, 7)

    assert (score.__name__, score.__doc__) == ("score", "Doc.")
    assert [one.name for one in reading(path).spans] == ["score", "score", "score", "ask"]


def test_a_span_without_a_trace_does_nothing() -> None:
    assert process.sink is None
    with span("x", a=1) as found:
        assert isinstance(found, span)


def test_items_that_went_out_one_by_one_are_counted(path: Path) -> None:
    with Noted(SpanWriter(str(path)), 5) as note:
        note.started(0)
        note.yielded(3)

    assert reading(path).parts[5].items == 3


def test_what_a_rank_counts_is_a_counter_of_the_trace(path: Path) -> None:
    journal = SpanWriter(str(path))
    journal.count("engine of g rank 0", {"running": 1.0})
    journal.count("engine of g rank 0", {"running": 3.0})
    epoch = TracedEpoch("g", 1, logs={key(0): reading(path)})
    began, ended = reading(path).counts[0][1] - 1, reading(path).counts[-1][1] + 1

    (counter,) = merge([epoch], [], SpanLog(), Trace(began, ended)).counters

    assert (counter.name, counter.values) == ("engine of g rank 0", {"running": (1.0, 3.0)})
