"""A group whose calls go through relays, two below each: eight ranks are three hops away."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private import worker as ray_worker

import phalanx as px
from phalanx.runtime.calls.relayed_door import RelayedDoor
from tests.runtime.fault_workers import within

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]


class Counter(px.Worker):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @px.register
    def note(self, number: int) -> None:
        self.seen.append(number)

    @px.register
    def noted(self) -> list[int]:
        return self.seen

    @px.register
    def tick(self) -> None:
        self.seen.append(-1)

    @px.register
    def nothing(self) -> None: ...

    @px.register(px.Dispatch.ROWS)
    def double(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": batch["x"] * 2}

    @px.register
    def refuse(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError("not this one")
        return self.rank

    @px.register
    def refuse_all(self) -> None:
        raise KeyError("none of them")

    @px.register
    def wait_for(self, path: str) -> int:
        within(60, lambda: os.path.exists(path))
        return self.rank

    @px.register
    def note_slowly(self, number: int) -> None:
        time.sleep(0.03)
        self.seen.append(number)

    @px.register
    def noted_items(self, number: int) -> Iterator[int]:
        self.seen.append(number)
        yield number

    @px.register
    def items(self, count: int) -> Iterator[int]:
        yield from range(count)


@pytest.fixture(scope="module")
def shared(ray_cluster: None) -> Iterator[px.WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch, px.ResourcePool([8], use_gpu=False, backend="ray") as pool:
        patch.setenv("PHALANX_RELAY_FROM", "2")
        patch.setenv("PHALANX_RELAY_FAN_OUT", "2")
        patch.setattr(
            "phalanx.transport.waves.AT_ONCE", 4
        )  # the six relays come in two waves, as the ranks do
        yield px.WorkerGroup(pool, Counter)


@pytest.fixture
def group(shared: px.WorkerGroup) -> px.WorkerGroup:
    if shared.state != "ready":
        shared.restart()
    return shared


def relays(group: px.WorkerGroup) -> list[tuple[str, int, str, int]]:
    """Name, ranks, host and pid of each, from those beside the ranks to the heads."""
    door = group.core.door
    assert isinstance(door, RelayedDoor)
    return door.whereabouts()


def test_eight_ranks_are_three_hops_away(group: px.WorkerGroup) -> None:
    assert [reached for _, reached, _, _ in relays(group)] == [2, 2, 2, 2, 4, 4]


def test_results_are_those_of_the_direct_way(group: px.WorkerGroup) -> None:
    batch = {"x": np.arange(40.0).reshape(20, 2), "scale": 3}

    result = group.double(batch)

    assert (result["x"] == batch["x"] * 2).all()
    assert result["scale"] == 3
    assert group.nothing() == [None] * 8
    assert group.refuse(-1) == list(range(8))
    assert group[5].refuse(-1) == 5
    assert group[2:7:2].refuse(-1) == [2, 4, 6]


def test_large_outputs_come_by_reference_and_go_on_to_another_call(group: px.WorkerGroup) -> None:
    batch = {"x": np.ones((80_000, 8))}

    twice = group.double(group.double.submit(batch))

    assert twice["x"].shape == (80_000, 8)
    assert (twice["x"] == 4).all()


def test_each_rank_may_change_its_own_output(group: px.WorkerGroup) -> None:
    first, second, *_ = group.noted()
    first.append(-1)

    assert -1 not in second


def test_calls_reach_each_rank_in_order_whatever_way_they_take(group: px.WorkerGroup) -> None:
    choice, expected, futures = random.Random(7), group.noted(), []
    for number in range(60):
        first, last = sorted(choice.sample(range(9), 2))
        view, ranks = (group, range(8)) if number % 3 == 0 else (group[first:last], range(first, last))
        futures.append(view.note.submit(number))
        if number % 20 == 10:
            futures.append(view.items.submit(2))  # streams go to the ranks directly
        for rank in ranks:
            expected[rank].append(number)

    px.gather(*futures)

    assert group.noted() == expected


def test_calls_of_every_kind_reach_each_rank_in_the_order_in_which_one_thread_made_them(
    group: px.WorkerGroup,
) -> None:
    group.restart()
    choice, expected, futures = random.Random(11), [[] for _ in range(8)], []
    back = pickle.loads(pickle.dumps(group))  # a view that travelled, and came back
    one = pickle.loads(pickle.dumps(group[6]))
    kinds: list[tuple[Callable[[int, int], Any], Callable[[int], Iterable[int]], bool]] = [
        (lambda n, r: group.note.submit(n), lambda r: range(8), False),
        (lambda n, r: group.tick.submit(), lambda r: range(8), True),
        (lambda n, r: group[r].note.submit(n), lambda r: [r], False),
        (lambda n, r: group.rank(r).tick.submit(), lambda r: [r], True),
        (lambda n, r: group.execute_rank_zero_async("note", n), lambda r: [0], False),
        (lambda n, r: group.execute_all_async("note", n), lambda r: range(8), False),
        (lambda n, r: back.note.submit(n), lambda r: range(8), False),
        (lambda n, r: back[r:].tick.submit(), lambda r: range(r, 8), True),
        (lambda n, r: one.note.submit(n), lambda r: [6], False),
        (lambda n, r: group[r:].note_slowly.submit(n), lambda r: range(r, 8), False),
        (lambda n, r: group.noted_items.submit(n), lambda r: range(8), False),
        (lambda n, r: group[r].noted_items.submit(n), lambda r: [r], False),
    ]
    for number in range(120):
        rank = choice.randrange(8)
        call, ranks, ticks = choice.choice(kinds)
        futures.append(call(number, rank))
        for each in ranks(rank):
            expected[each].append(-1 if ticks else number)

    px.gather(*futures)

    assert group.noted() == expected


def test_a_call_by_rays_own_handle_follows_one_that_has_returned_and_goes_before_one_that_is_made_after(
    group: px.WorkerGroup,
) -> None:
    group.restart()
    handles = [endpoint.handle for endpoint in group.core.endpoints]

    for number in range(0, 40, 2):
        group.note(number)
        ray.get([handle.note.remote(number + 1) for handle in handles])

    assert group.noted() == [list(range(40))] * 8


def test_a_stream_behind_a_call_through_relays_is_begun_by_nobody_who_waits(
    group: px.WorkerGroup, tmp_path: Path
) -> None:
    group.restart()
    held = group[2:4].wait_for.submit(str(tmp_path / "go"))
    items = group[1:4].noted_items.submit(1)
    later = group.note.submit(2)

    assert group[6].noted() == [2]  # whose relays have no call under way
    assert not held.done()
    (tmp_path / "go").touch()
    assert held.result() == [2, 3]
    px.gather(items, later)
    assert group.noted() == [[2], [1, 2], [1, 2], [1, 2], [2], [2], [2], [2]]


def test_a_stream_goes_on_after_a_call_through_relays_that_failed(group: px.WorkerGroup) -> None:
    failing = group.refuse.submit(2)

    assert list(group[2].items.stream(2)) == [0, 1]
    with pytest.raises(KeyError, match="rank 2"):
        failing.result()


def test_an_error_names_its_rank_and_the_group_stays_ready(group: px.WorkerGroup) -> None:
    with pytest.raises(KeyError, match="rank 3"):
        group.refuse(3)

    assert group.nothing() == [None] * 8


def test_what_was_raised_is_in_no_log_of_a_relay_and_not_printed_here(
    group: px.WorkerGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    pids = [pid for _, _, _, pid in relays(group)]
    with pytest.raises(KeyError, match="rank 7"):
        group.refuse_all()

    gc.collect()
    group.core.door.look()  # the relays let go of the call
    assert group.nothing() == [None] * 8

    node: Any = ray_worker._global_node
    logs = [path for pid in pids for path in Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.*")]
    assert logs
    assert not any(word in path.read_text() for path in logs for word in ("Traceback", "Unhandled"))
    assert "Unhandled" not in capfd.readouterr().err


def test_a_deadline_names_the_ranks_that_were_late(group: px.WorkerGroup, tmp_path: Any) -> None:
    with pytest.raises(px.CallTimeout) as raised:
        group[1:3].wait_for.options(timeout=1.0)(str(tmp_path / "never"))

    assert sorted(failure.rank for failure in raised.value.failures) == [1, 2]


def test_a_call_is_cancelled(group: px.WorkerGroup, tmp_path: Any) -> None:
    future = group.wait_for.submit(str(tmp_path / "never"))

    assert future.cancel()

    with pytest.raises(px.CallCancelled):
        future.result()
    assert group.nothing() == [None] * 8


def test_outputs_come_one_by_one(group: px.WorkerGroup) -> None:
    assert sorted(group.refuse.submit(-1).stream()) == [(rank, rank) for rank in range(8)]


@pytest.mark.soak  # test_relay_deaths.py has it in CI
@pytest.mark.parametrize("index", [0, 5], ids=["beside the ranks", "head"])
def test_a_call_under_way_is_lost_with_a_relay_and_the_error_names_it(
    group: px.WorkerGroup, tmp_path: Any, index: int
) -> None:
    name, _, _, pid = relays(group)[index]
    future = group.wait_for.submit(str(tmp_path / "never"))

    os.kill(pid, signal.SIGKILL)

    with pytest.raises(px.WorkerDiedError, match=name):
        future.result(timeout=30)
    assert group.state == "broken"


@pytest.mark.parametrize(
    "index", [0, pytest.param(5, marks=pytest.mark.soak)], ids=["beside the ranks", "head"]
)
def test_an_idle_relay_that_died_is_replaced(group: px.WorkerGroup, index: int) -> None:
    group.nothing()
    pid = relays(group)[index][3]

    os.kill(pid, signal.SIGKILL)
    assert within(10, lambda: group.core.door.lost() is not None)

    assert group.nothing() == [None] * 8
    assert pid not in [relay[3] for relay in relays(group)]


def test_nothing_is_left_of_relays_once_the_group_is_closed(ray_cluster: None, monkeypatch: Any) -> None:
    monkeypatch.setenv("PHALANX_RELAY_FROM", "2")
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Counter)
        pids = [relay[3] for relay in relays(group)]

    assert within(5, lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
