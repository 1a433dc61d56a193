"""Sticky routing: a conversation stays with the rank that has its caches."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx as px
from phalanx.api.sticky import Pins
from tests.support.fault_workers import lose


class Server(px.Worker):
    @px.register
    def generate(self) -> int:
        return self.rank


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:3], Server, name="servers")


def test_a_key_stays_with_its_rank_and_keys_are_spread(group: px.WorkerGroup) -> None:
    first = {key: px.engines.sticky(group, key).generate() for key in "abc"}
    assert sorted(first.values()) == [0, 1, 2]
    again = {key: px.engines.sticky(group, key).generate.submit() for key in "abc"}
    assert {key: future.result(30) for key, future in again.items()} == first
    with pytest.raises(AttributeError, match="generat"):
        px.engines.sticky(group, "a").generat()


@pytest.mark.slow_on_cluster
def test_keys_are_spread_again_after_a_restart(group: px.WorkerGroup) -> None:
    key_of = {px.engines.sticky(group, key).generate(): key for key in "abc"}
    lose(group, 2, call=group.generate)
    group.restart()  # the other tests use it, too
    again = [key_of[before] for before in (2, 1, 2)]
    assert [px.engines.sticky(group, key).generate() for key in again] == [0, 1, 0]


def test_concurrent_first_uses_share_one_table_of_pins(
    group: px.WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def made(margin: float) -> Pins:
        both.wait(10)
        return Pins(margin)

    monkeypatch.setattr("phalanx.api.sticky.Pins", made)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda key: px.engines.sticky(group, key, margin=7), "ab")

    assert first.generate() != second.generate()


PROCESSES = [object() for _ in range(6)]
loads = st.dictionaries(st.integers(0, 5), st.integers(0, 9), min_size=1)


def test_a_key_is_pinned_again_after_the_loss_or_replacement_of_its_process_or_its_eviction() -> None:
    pins, two = Pins(5), Pins(5, most=2)
    pins.rank_of("a", {0: 0, 1: 1}, PROCESSES)
    assert pins.rank_of("a", {1: 1, 2: 2}, PROCESSES) == 1
    assert pins.rank_of("a", {0: 0, 1: 3}, PROCESSES) == 1
    assert pins.rank_of("a", {0: 0, 1: 3}, PROCESSES[2:]) == 0

    for key in ("a", "b", "a", "c"):
        two.rank_of(key, {0: 0, 1: 0}, PROCESSES)
    assert [two.rank_of(key, {0: 1, 1: 0}, PROCESSES) for key in "ab"] == [0, 1]


@given(st.lists(st.tuples(st.integers(0, 4), loads)), st.integers(0, 4))
def test_a_key_moves_exactly_if_the_load_of_its_rank_exceeds_the_margin(
    calls: list[tuple[int, dict[int, int]]], margin: int
) -> None:
    pins, known = Pins(margin), dict[int, int]()
    for key, load in calls:
        rank = pins.rank_of(key, load, PROCESSES)
        assert load[rank] - min(load.values()) <= margin
        if key in known and known[key] in load and load[known[key]] - min(load.values()) <= margin:
            assert rank == known[key]
        known[key] = rank
