"""The page with the running calls and the status of a rank."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from phalanx.config import Settings
from phalanx.wire import call_page


def read(page: call_page.CallPage) -> call_page.CallPageState:
    return call_page.read(os.pread(page.fd, call_page.SIZE, 0))


def test_the_page_has_methods_shortened_to_64_letters_and_the_last_status_of_a_rank() -> None:
    page = call_page.CallPage()
    for call, method in enumerate(["actor.update", "", "actor.update", "größe", "x" * 100, "y"]):
        call_page.Listed(page, call + 1, method).__enter__()
    page.tell("812 tokens/s, 12 running")
    page.tell("idle")

    assert read(page).status == "idle"
    assert list(read(page).methods.values()) == ["actor.update", "", "actor.update", "größe", "x" * 64, "y"]


def test_concurrent_calls_have_separate_slots_until_all_slots_are_used() -> None:
    page, numbers = call_page.CallPage(), range(1, 2 * call_page.CALLS)
    assert Settings.max_in_flight <= call_page.CALLS
    with ExitStack() as calls:
        for number in numbers:
            calls.enter_context(call_page.Listed(page, number, ""))
        assert set(read(page).running) == set(numbers[: call_page.CALLS])
    assert read(page).running == {}


def test_a_rank_knows_its_latest_calls_that_threads_cancelled_concurrently() -> None:
    page, numbers = call_page.CallPage(), range(2**63, 2**63 + call_page.CALLS)

    def cancel(number: int) -> None:
        with open(f"/proc/self/fd/{page.fd}", "r+b") as opened:
            call_page.cancel(opened.fileno(), number)

    cancel(1)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(cancel, numbers))
    assert all(page.cancelled(number) for number in numbers)
    assert not any(page.cancelled(number) for number in (0, 1, 2))  # never, or long ago
