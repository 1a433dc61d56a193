"""Failures and restarts on every backend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import phalanx as px
from tests.support.fault_workers import Trouble

pytestmark = pytest.mark.timeout(120)


class Leaver(Trouble):
    @px.register(rerun_on_restart=True)
    def load_badly(self) -> None:
        raise ValueError("a restart that made this call again would fail")

    @px.register
    def leave_alone(self, rank: int) -> int:
        if self.rank == rank:
            raise SystemExit(7)
        return self.rank


class Nested(px.Worker):
    @px.register
    async def leave(self) -> None:
        raise SystemExit(3)

    @px.register
    def add(self, x: int) -> int:
        return x + 1

    @px.register
    async def ask(self, other: px.WorkerGroup) -> list[int]:
        return other.add(1)

    @px.register
    async def ask_through(self, between: px.WorkerGroup, other: px.WorkerGroup) -> list[list[int]]:
        return [*between.ask(other), await asyncio.to_thread(other.add, 2)]


def test_sys_exit_in_an_asynchronous_method_is_an_error_of_the_call(
    pool: px.ResourcePool, backend: str
) -> None:
    with px.WorkerGroup(pool[0:1], Nested, max_concurrency=2) as group:
        with pytest.raises(px.CallError, match=r"SystemExit|sys\.exit"):
            group.leave()
        if backend == "ray":  # inline, calls of a rank do not interleave
            assert group.add(1) == [2]


@pytest.mark.parametrize("in_loop", [False, True])
def test_inline_ranks_call_each_other_from_asynchronous_methods_and_from_threads(
    here: px.ResourcePool, in_loop: bool
) -> None:
    first, second, third = (px.WorkerGroup(here[rank : rank + 1], Nested) for rank in range(3))

    async def called() -> list[list[list[int]]]:
        return first.ask_through(second, third)

    result = asyncio.run(called()) if in_loop else first.ask_through(second, third)
    assert result == [[[2], [3]]]


@pytest.fixture(scope="module")
def shared(pool: px.ResourcePool) -> px.WorkerGroup:
    return px.WorkerGroup(pool[0:3], Leaver)


def test_a_failure_names_its_ranks_once_and_leaves_the_group_ready_if_all_ranks_return(
    group: px.WorkerGroup,
) -> None:
    for view, ranks in ((group[1], (1,)), (group, (0, 1, 2))):
        with pytest.raises(ValueError, match="size 3") as raised:
            view.refuse(3)
        assert raised.value.cause_ranks == ranks
        assert raised.value.victims == ()

    assert group.ping() == [0, 1, 2]


def test_the_error_of_a_failed_argument_keeps_its_type(group: px.WorkerGroup) -> None:
    failed = group.refuse.submit(3)

    with pytest.raises(ValueError, match=r"result of a call that failed.*size 3") as raised:
        group.refuse(failed)

    assert isinstance(raised.value, px.RemoteCallError)
    assert group.ping() == [0, 1, 2]


def test_an_argument_that_was_lost_with_its_process_is_named_as_lost(pool: px.ResourcePool) -> None:
    with px.WorkerGroup(pool[0:1], Leaver) as leaving, px.WorkerGroup(pool[0:1], Leaver) as group:
        lost = leaving.leave_alone.submit(0)
        with pytest.raises(px.CallError, match=r"ArgumentLost: an argument.* was lost with the process"):
            group.load(lost)


def test_a_rank_that_exits_breaks_the_group_and_later_calls_name_that_cause(group: px.WorkerGroup) -> None:
    with pytest.raises(px.WorkerDiedError) as raised:
        group.leave_alone(2)

    assert raised.value.causes[0].exit == "exit code 7"
    with pytest.raises(px.GroupBroken, match="exit code 7") as later:
        group.ping()
    assert str(later.value.cause) == str(raised.value)


@pytest.mark.slow_on_cluster
def test_a_restart_reruns_the_last_call_of_each_method_as_sent_and_views_follow_it(
    pool: px.ResourcePool,
) -> None:
    group, steps = px.WorkerGroup(pool[0:3], Leaver), [2]
    group.load([1])
    group.load(steps)
    group[0].load([9])
    with pytest.raises(px.RemoteCallError):
        group.load_badly()
    steps.append(3)
    view, method, old = group[1:3], group.ping, group.ping.submit()

    group.restart()

    assert group.what_is_loaded() == [[9], [2], [2]]
    assert (view.ping(), method()) == ([1, 2], [0, 1, 2])
    with pytest.raises(px.errors.StaleEpoch) as raised:
        old.result()
    assert (raised.value.epoch, raised.value.current) == (0, 1)
    group.close()
    with pytest.raises(px.GroupClosed):
        group.restart()


def test_a_failed_restart_leaves_the_group_broken_with_its_error(
    pool: px.ResourcePool, tmp_path: Path
) -> None:
    class Once(px.Worker):
        def __init__(self, path: str) -> None:
            with open(path, "a+") as note:
                note.seek(0)
                if note.read():
                    raise ValueError("only once")
                note.write("x")

        @px.register
        def ping(self) -> int:
            return self.rank

    group = px.WorkerGroup(pool[3:4], Once.bind(str(tmp_path / "note")))
    assert group.ping() == [0]

    with pytest.raises(ValueError, match="only once"):
        group.restart()

    with pytest.raises(px.GroupBroken, match="only once") as later:
        group.ping()
    assert later.value.cause is not None
    assert later.value.cause.__traceback__ is None  # the group keeps no frames of its caller
    group.close()


@pytest.mark.soak_on_cluster
def test_a_restart_policy_restarts_the_group_at_the_next_call_up_to_its_limit(pool: px.ResourcePool) -> None:
    policy = px.RestartPolicy(max_restarts=1, window_s=1000.0)
    with px.WorkerGroup(pool[3:4], Leaver, on_failure=policy) as policed:
        policed.load(3)
        with pytest.raises(px.WorkerDiedError):
            policed.leave_alone(0)
        assert policed.what_is_loaded() == [3]
        assert policed.epoch == 1

        with pytest.raises(px.WorkerDiedError):
            policed.leave_alone(0)
        with pytest.raises(px.GroupBroken, match="does not allow another restart"):
            policed.ping()
