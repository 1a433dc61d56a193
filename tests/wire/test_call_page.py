"""The page with the running calls and the status of a rank."""

from __future__ import annotations

import os
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from phalanx.wire import call_page

NUMBERS = st.integers(1, 2**63)


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


@given(st.lists(NUMBERS, unique=True, max_size=2 * call_page.SLOTS))
def test_concurrent_calls_have_separate_slots_until_all_slots_are_used(numbers: list[int]) -> None:
    page = call_page.CallPage()
    with ExitStack() as calls:
        for number in numbers:
            calls.enter_context(call_page.Listed(page, number, ""))
        assert set(read(page).running) == set(numbers[: call_page.SLOTS])
    assert read(page).running == {}


@given(st.lists(NUMBERS, unique=True, min_size=1, max_size=2 * call_page.CANCELLED))
def test_a_rank_knows_its_latest_cancelled_calls(numbers: list[int]) -> None:
    page = call_page.CallPage()
    assert not any(page.cancelled(number) for number in numbers)
    for number in numbers:
        call_page.cancel(page.fd, number)

    assert all(page.cancelled(number) for number in numbers[-call_page.CANCELLED :])
    assert not page.cancelled(0)
    assert not page.cancelled(2**63 + 1)  # never cancelled
