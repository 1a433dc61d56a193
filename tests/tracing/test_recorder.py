"""What the driver notes of calls, and how it is put together with what the ranks wrote."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

from phalanx.tracing.events import Part, Span, Track
from phalanx.tracing.recorder import Draft, Place, TraceRecorder, assemble
from phalanx.tracing.span_writer import Reading
from tests.tracing.made_up import MS, at, key


def drafted(place: Place, number: int, ms: float = 0) -> Draft:
    draft = Draft(number, place, "", "update", at(ms))
    draft.number = 1000 + number
    draft.ranks = (0,)
    draft.encoded, draft.sent, draft.message_bytes = [at(ms + 1)], [at(ms + 2)], [10]
    draft.fetched = {0: at(ms + 20)}
    return draft


def place(host: str) -> Place:
    return Place("policy", 0, tracks=[Track(key(0), host)])


def test_a_rank_on_another_host_is_put_on_the_drivers_clock() -> None:
    ahead = 5_000 * MS
    there = place("elsewhere")
    seen = Part(
        0, received=at(3) + ahead, started=at(4) + ahead, finished=at(17) + ahead, returned=at(18) + ahead
    )
    span = Span("inner", at(5) + ahead, at(6) + ahead, key(0), 1001)
    there.readings[key(0)] = Reading({1001: seen}, [span])
    trace = assemble([there], [drafted(there, 1)], [], at(0), at(100))

    (clock,) = trace.clocks
    assert (clock.host, abs(clock.offset - ahead) <= clock.uncertainty) == ("elsewhere", True)
    part = trace.calls[0].parts[0]
    assert part.received is not None
    assert part.returned is not None
    assert at(1) <= part.received < part.returned <= at(20)
    assert trace.spans[0].call == 1
    assert part.received <= trace.spans[0].began <= part.returned


def test_ranks_of_the_drivers_host_have_its_clock() -> None:
    here = place(socket.gethostname())
    here.readings[key(0)] = Reading({1001: Part(0, received=at(3), returned=at(18))})
    trace = assemble([here], [drafted(here, 1)], [], at(0), at(100))

    assert trace.clocks == ()
    assert trace.calls[0].parts[0].received == at(3)


def test_spans_of_calls_that_are_not_in_the_trace_are_left_out() -> None:
    here = place(socket.gethostname())
    inside, other, early, background = (
        Span("a", at(3), at(4), key(0), 1001),
        Span("b", at(3), at(4), key(0), 7),
        Span("c", at(-3), at(4), key(0), None),
        Span("d", at(5), at(6), key(0), None),
    )
    here.readings[key(0)] = Reading({1001: Part(0, received=at(3))}, [inside, other, early, background])
    trace = assemble([here], [drafted(here, 1)], [], at(0), at(100))

    assert [span.name for span in trace.spans] == ["a", "d"]


def test_places_without_a_call_in_the_trace_are_left_out() -> None:
    used, unused = place("a"), Place("idle", 0, tracks=[Track(key(0, "idle"), "a")], notes=["unread"])
    trace = assemble([used, unused], [drafted(used, 1)], [], at(0), at(100))

    assert [track.key.group for track in trace.tracks] == ["policy"]
    assert trace.notes == ()


def test_of_very_many_calls_the_oldest_are_dropped_and_counted() -> None:
    recorder, here = TraceRecorder(limit=3), place("a")
    for number in range(5):
        recorder.keep(drafted(here, number, number))
    trace = recorder.trace([here], at(0), at(100))

    assert [call.id for call in trace.calls] == [2, 3, 4]
    assert "The first 2 calls are left out" in trace.notes[0]


def test_of_very_many_spans_the_oldest_are_dropped() -> None:
    recorder = TraceRecorder(limit=2)
    numbers = [recorder.enter(str(n), {}) for n in range(4)]
    for number in numbers:
        recorder.leave(number, None)
    trace = recorder.trace([], 0, 2**63)

    assert [span.name for span in trace.spans] == ["2", "3"]
    assert all(span.ended is not None for span in trace.spans)


def test_each_message_has_its_bytes_and_the_times_at_which_it_was_made_and_sent() -> None:
    draft = Draft(1, place("a"), "", "update", 0)
    for nbytes in (2, 3):
        draft.composed(nbytes)
        draft.posted()

    assert draft.message_bytes == [2, 3]
    assert [a <= b for a, b in zip(draft.encoded, draft.sent, strict=True)] == [True, True]


def test_a_call_that_ends_with_an_error_says_which() -> None:
    draft = Draft(1, place("a"), "", "update", 0)
    draft.end(KeyError("x"))

    assert (draft.error, draft.ended is not None) == ("KeyError: 'x'", True)


def test_threads_may_record_at_once() -> None:
    recorder, here = TraceRecorder(), place("a")

    def work() -> None:
        for number in range(200):
            recorder.leave(recorder.enter("x", {}), None)
            recorder.keep(drafted(here, number))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace = recorder.trace([replace(here)], 0, 2**63)

    assert (len(trace.calls), len(trace.spans)) == (800, 800)
