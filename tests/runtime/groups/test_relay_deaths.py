"""A relay dies at each step of a call, beside the ranks or as a head: what is lost is one error that names it.

Eight ranks with two below each relay: relays 0 to 3 have two ranks each, the heads 4 and 5 two relays each.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.runtime.calls.relayed_door import RelayedDoor
from phalanx.testing import faults
from tests.conftest import through_relays
from tests.runtime.fault_workers import is_there, taking_less_than, within
from tests.runtime.groups.dying_relays import Held, began, dying, ended, order

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]
LEAF, HEAD = 1, 5  # ranks 2 and 3; ranks 4 to 7
SOAK = pytest.mark.soak


def each_place(slow: int | None = None) -> pytest.MarkDecorator:
    """Both places of a relay, one of them in the slow suite where that is said."""
    places = [pytest.param(place, marks=() if place == slow else SOAK) for place in (LEAF, HEAD)]
    return pytest.mark.parametrize("place", places, ids=["beside the ranks", "head"])


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where relays look up when they are to die."""
    return tmp_path_factory.mktemp("ordered")


@pytest.fixture(scope="module")
def shared(ray_cluster: None, ordered: Path) -> Iterator[px.WorkerGroup]:
    with pytest.MonkeyPatch.context() as patch, px.ResourcePool([8], use_gpu=False, backend="ray") as pool:
        through_relays(patch)
        patch.setattr("phalanx.transport.ray.transport.RayRelays", dying(ordered))
        yield px.WorkerGroup(pool, Held)


@pytest.fixture
def group(shared: px.WorkerGroup, ordered: Path) -> px.WorkerGroup:
    for path in ordered.iterdir():
        path.unlink()
    if shared.state != "ready":
        shared.restart()
    return shared


def relays(group: px.WorkerGroup) -> list[tuple[str, int]]:
    """The name and the pid of each."""
    door = group.core.door
    assert isinstance(door, RelayedDoor)
    return [(name, pid) for name, _, _, pid in door.whereabouts()]


def end(group: px.WorkerGroup, place: int) -> str:
    """Kill a relay; its name."""
    name, pid = relays(group)[place]
    os.kill(pid, signal.SIGKILL)
    return name


def lost_with(name: str, future: px.CallFuture) -> px.WorkerDiedError:
    """The error of a call that was lost with a relay."""
    with taking_less_than(10.0), pytest.raises(px.WorkerDiedError, match=name) as raised:
        future.result(timeout=30)
    return raised.value


def reached(place: int) -> set[int]:
    return {2, 3} if place == LEAF else {4, 5, 6, 7}


@each_place(slow=HEAD)
def test_before_it_sends(group: px.WorkerGroup, ordered: Path, place: int) -> None:
    name = relays(group)[place][0]
    order(ordered, name, "before it sends")

    error = lost_with(name, group.hold.submit(str(ordered)))

    assert set(error.cause_ranks) == reached(place)
    assert group.state == "broken"
    assert not [rank for rank in reached(place) if (ordered / f"began-{rank}").exists()]


@each_place(slow=LEAF)
def test_after_it_sent_to_some(group: px.WorkerGroup, ordered: Path, place: int) -> None:
    name = relays(group)[place][0]
    order(ordered, name, "after it sent to some")

    error = lost_with(name, group.hold.submit(str(ordered)))

    assert set(error.cause_ranks) == reached(place)
    assert group.state == "broken"


@each_place(slow=LEAF)
def test_while_ranks_compute(group: px.WorkerGroup, ordered: Path, place: int) -> None:
    future = group.hold.submit(str(ordered))
    assert began(ordered, range(8))

    error = lost_with(end(group, place), future)

    assert set(error.cause_ranks) == reached(place)
    with pytest.raises(px.GroupBroken):
        group.noted()


@each_place(slow=HEAD)
def test_after_some_results_came(group: px.WorkerGroup, ordered: Path, place: int) -> None:
    future = group.hold.submit(str(ordered))
    assert began(ordered, range(8))
    for rank in (2, 4, 5):
        (ordered / f"go-{rank}").touch()
    assert ended(ordered, (2, 4, 5))

    error = lost_with(end(group, place), future)

    assert set(error.cause_ranks) == reached(place)
    assert group.state == "broken"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[px.WorkerGroup]:
    """A group that takes what the first one gives."""
    monkeypatch.setenv("PHALANX_RELAY_FROM", "0")
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        yield px.WorkerGroup(pool, Held)


@SOAK
def test_while_a_result_is_handed_on(group: px.WorkerGroup, other: px.WorkerGroup, ordered: Path) -> None:
    handed = group.hold_large.submit(str(ordered))
    total = other.total.submit(handed)
    assert began(ordered, range(8))

    lost_with(end(group, LEAF), handed)

    with taking_less_than(10.0), pytest.raises(px.PhalanxError, match="lost with the process that held it"):
        total.result(timeout=30)
    assert (group.state, other.state) == ("broken", "ready")
    assert other.noted() == [[], []]


@SOAK
def test_a_result_that_is_handed_on_does_not_need_the_head_any_more(
    group: px.WorkerGroup, other: px.WorkerGroup, ordered: Path
) -> None:
    handed = group.hold_large.submit(str(ordered))
    total = other.total.submit(handed)
    assert began(ordered, range(8))

    end(group, HEAD)
    (ordered / "go").touch()

    assert [int(output[0]) for output in handed.result(timeout=30)] == list(range(8))
    assert total.result(timeout=30) == [100_000.0 * sum(range(8))] * 2


@SOAK
def test_between_calls_with_a_future_that_was_not_read(group: px.WorkerGroup, ordered: Path) -> None:
    (ordered / "go").touch()
    unread = group.hold_large.submit(str(ordered))
    assert ended(ordered, range(8))

    lost_with(end(group, LEAF), unread)

    assert group.state == "broken"


@SOAK
def test_what_a_head_has_handed_on_is_not_lost_with_it(group: px.WorkerGroup, ordered: Path) -> None:
    (ordered / "go").touch()
    unread = group.hold_large.submit(str(ordered))
    assert within(30.0, unread.done)

    end(group, HEAD)

    assert [int(output[0]) for output in unread.result(timeout=30)] == list(range(8))


@each_place()
def test_between_calls_with_nothing_that_could_be_lost(
    group: px.WorkerGroup, ordered: Path, place: int
) -> None:
    (ordered / "go").touch()
    assert group.hold(str(ordered)) == list(range(8))
    before = relays(group)
    end(group, place)
    assert within(10.0, lambda: group.core.door.lost() is not None)

    assert group.hold(str(ordered)) == list(range(8))

    assert not {pid for _, pid in before} & {pid for _, pid in relays(group)}
    assert within(5.0, lambda: not any(is_there(pid) for _, pid in before))


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed < 2 else SOAK) for seed in range(6)])
def test_whenever_a_relay_dies_calls_end_in_their_result_or_in_an_error_that_names_it(
    group: px.WorkerGroup, ordered: Path, seed: int
) -> None:
    choice = random.Random(seed)
    (ordered / "go").touch()
    name, pid = relays(group)[choice.randrange(6)]
    timer = threading.Timer(choice.random() * 0.5, os.kill, (pid, signal.SIGKILL))
    futures: list[px.CallFuture] = []
    timer.start()
    with contextlib.suppress(px.GroupBroken):
        for number in range(100):
            futures.append(group.note.submit(number))
            if number % 5 == 0:
                futures[-1].exception()
    timer.join()
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    assert not [str(error) for error in errors if name not in f"{error} {getattr(error, 'cause', '')}"]
    group.restart()
    assert group.hold(str(ordered)) == list(range(8))


@SOAK
def test_a_rank_that_died_is_replaced_and_the_relays_reach_the_new_one(
    group: px.WorkerGroup, ordered: Path
) -> None:
    group.restart()
    group.note(1)
    px.snapshot(group)
    before = {pid for _, pid in relays(group)}
    faults.kill(group, 3)
    assert within(5.0, lambda: group.state == "broken")

    assert px.replace(group) == (3,)

    group.note(2)
    assert group.noted() == [[1, 2]] * 8
    assert within(5.0, lambda: not any(map(is_there, before)))


@SOAK
def test_close_while_a_call_is_under_way_leaves_neither_ranks_nor_relays(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_relays(monkeypatch)
    with px.ResourcePool([8], use_gpu=False, backend="ray") as pool:
        group = px.WorkerGroup(pool, Held)
        pids = [pid for _, pid in relays(group)] + [e.facts.pid for e in group.core.endpoints]
        future = group.hold.submit(str(tmp_path))
        assert began(tmp_path, range(8))

        with taking_less_than(10.0):
            group.close()

        with pytest.raises(px.GroupClosed):
            future.result()
    assert within(5.0, lambda: not any(map(is_there, pids)))


@SOAK
def test_a_restart_ends_the_relays_and_starts_new_ones(group: px.WorkerGroup, ordered: Path) -> None:
    before = {pid for _, pid in relays(group)}
    future: Any = group.hold.submit(str(ordered))

    group.restart()

    with pytest.raises(px.StaleEpoch):
        future.result()
    assert within(5.0, lambda: not any(map(is_there, before)))
    assert group.noted() == [[]] * 8
