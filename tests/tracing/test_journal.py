"""The trace file of a process and its reader, also if the process was lost."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from phalanx.tracing.spans import CallSpan, SpanLog, SpanWriter, current, path_of, process, read_log, span
from tests.support.odd_exceptions import Mute
from tests.tracing.made_up import key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(path_of(str(tmp_path / "rank-0"), "abc"))


def reading(path: Path) -> SpanLog:
    return read_log(path.read_bytes().splitlines(), key(0))


def test_a_call_is_written_from_beginning_to_end(path: Path) -> None:
    with CallSpan(SpanWriter(str(path)), 5) as note:
        assert path.read_bytes().startswith(b'["in"')  # at once: its arguments may never arrive
        note.started(100)
        note.finished()
        note.result_bytes = 40
        note.items = 3
    part = reading(path).parts[5]

    assert (part.argument_bytes, part.result_bytes, part.error, part.items) == (100, 40, None, 3)
    times = (part.received, part.started, part.finished, part.returned)
    assert list(times) == sorted(times)  # type: ignore[type-var]


@pytest.mark.parametrize("starts", [True, False])
def test_an_error_is_written_with_the_call(path: Path, starts: bool) -> None:
    with pytest.raises(ValueError), CallSpan(SpanWriter(str(path)), 5) as note:
        if starts:
            note.started(0)
        raise ValueError("no\nsecond line")
    part = reading(path).parts[5]

    assert (part.error, part.returned is None) == ("ValueError: no", False)
    assert [part.started is None, part.finished is None] == [not starts] * 2


def test_truncated_lines_unknown_kinds_and_unknown_calls_are_skipped(path: Path) -> None:
    writer = SpanWriter(str(path))
    for number in (1, 2):
        with CallSpan(writer, number) as note:
            note.started(0)
    whole = path.read_bytes()
    for cut in range(1, 60, 7):
        assert read_log(whole[:-cut].splitlines(), key(0)).parts[1].returned is not None
    lines = [b'["later version", 1]', b"{}", b'["run", 9, 1, 1]', b'["leave", 9, 1, null]', b"\xff"]

    assert read_log([*lines, b'["in", 1, 3, "", "m"]'], key(0)).parts.keys() == {1}


@pytest.mark.parametrize(("path", "lost"), [("/dev/null/rank-0.events", ""), ("/dev/full", "the rest of ")])
def test_a_file_that_cannot_be_written_is_logged_once(
    path: str, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "phalanx"):
        writer = SpanWriter(path)
        writer.write("in", 1)
        writer.write("in", 2)

    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [f"{lost}this process's part of the trace is lost"]


def test_a_trace_file_stops_at_its_size_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.tracing.spans._LIMIT", 200)
    writer = SpanWriter(str(path))
    for number in range(100):
        with CallSpan(writer, number):
            pass

    assert reading(path).full
    assert path.stat().st_size < 300


def test_a_forked_process_writes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SpanWriter(str(path))
    writer.leave(writer.enter("here", {}), None)
    monkeypatch.setattr("phalanx.tracing.spans.os.getpid", lambda: 0)
    writer.leave(writer.enter("forked", {}), None)

    assert [one.name for one in reading(path).spans] == ["here"]


def test_a_span_belongs_to_its_call_and_outside_of_calls_to_the_rank(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpanWriter(str(path))
    monkeypatch.setattr(process, "sink", writer)
    with pytest.raises(KeyError), CallSpan(writer, 5), span("inside", rows=3):
        thread = threading.Thread(target=lambda: span("beside")(lambda: None)())
        thread.start()
        thread.join()
        raise KeyError("x")

    assert [(one.name, one.call, one.attributes, one.error) for one in reading(path).spans] == [
        ("inside", 5, {"rows": 3}, "KeyError: 'x'"),
        ("beside", None, {}, None),
    ]


def test_attributes_and_errors_without_text_do_not_break_a_traced_call(path: Path) -> None:
    with pytest.raises(Mute), CallSpan(SpanWriter(str(path)), 5):
        with span("x", shape=(2, 3), odd=Mute(), none=None, loss=float("nan"), big=10**5000):
            pass
        raise Mute
    log = reading(path)

    assert log.spans[0].attributes.pop("big").startswith("<int: ValueError")
    assert log.spans[0].attributes == {
        "shape": "(2, 3)",
        "odd": "<Mute: RuntimeError: no text>",
        "none": None,
        "loss": "nan",
    }
    assert (log.parts[5].error or "").startswith("Mute: ")
    assert current.get() is None


def test_each_call_of_a_decorated_function_or_generator_is_a_span_until_its_end(path: Path) -> None:
    @span("score")
    def score(x: int) -> int:
        """Doc."""
        return score(x - 1) + 1 if x else 0

    @span("ask")
    async def ask() -> int:
        return 7

    @span("items")
    def items(count: int) -> Iterator[int]:
        for item in range(count):
            with span("item"):
                yield item

    @span("more")
    async def more() -> AsyncIterator[int]:
        yield 7

    async def read() -> list[int]:
        return [item async for item in more()]

    with CallSpan(SpanWriter(str(path)), 5):
        assert (score(2), asyncio.run(ask())) == (2, 7)
        assert (list(items(2)), asyncio.run(read())) == ([0, 1], [7])
    spans = reading(path).spans
    outer, *inner = spans[4:7]

    assert [one.name for one in spans[:4]] == ["score", "score", "score", "ask"]
    assert [one.name for one in spans[4:]] == ["items", "item", "item", "more"]
    assert all(outer.ended >= one.ended for one in inner)  # type: ignore[operator]
    assert (score.__name__, score.__doc__) == ("score", "Doc.")
    assert inspect.isgeneratorfunction(items) and inspect.isasyncgenfunction(more)


def test_a_decorated_context_manager_gets_the_error_of_its_block() -> None:
    @asynccontextmanager
    @span("block")
    async def forgiving() -> AsyncGenerator[int]:
        with suppress(KeyError):
            yield 7

    async def run() -> int:
        async with forgiving() as value:
            raise KeyError(value)
        return 8

    assert asyncio.run(run()) == 8
