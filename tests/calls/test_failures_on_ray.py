"""Groups on Ray whose ranks fail, hang or die: the first cause is reported soon, and alone."""

from __future__ import annotations

import signal
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from pathlib import Path

import pytest

import phalanx as px
from phalanx.testing import faults
from tests.support.fault_workers import Trouble, all_running, is_there, taking_less_than, within

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def shared(ray_cluster: None) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([4], use_gpu=False, backend="ray") as pool:
        yield px.WorkerGroup(pool, Trouble)


def test_the_cause_is_named_within_2_s_while_its_peers_wait_in_a_collective(group: px.WorkerGroup) -> None:
    group.join()

    with taking_less_than(2.0), pytest.raises(ValueError, match="bad batch") as raised:
        group.reduce(2)

    assert raised.value.cause_ranks == (2,)
    assert raised.value.victims == (0, 1, 3)
    assert "all_reduce" in raised.value.failures[1].stack
    with taking_less_than(0.1), pytest.raises(px.GroupBroken) as later:
        group.ping()
    assert str(later.value.cause) == str(raised.value)


@pytest.mark.parametrize(
    ("how", "ended_by"),
    [
        ("SIGKILL", "SIGKILL"),
        pytest.param("segfault", "signal SIGSEGV", marks=pytest.mark.slow),
        pytest.param("exit", "exit code 7", marks=pytest.mark.slow),
        pytest.param("SIGTERM", "signal SIGTERM", marks=pytest.mark.soak),
        pytest.param("abort", "signal SIGABRT", marks=pytest.mark.soak),
    ],
)
def test_the_death_of_a_busy_rank_is_found_in_2_s_with_cause_and_last_line(
    group: px.WorkerGroup, how: str, ended_by: str
) -> None:
    with taking_less_than(2.0), pytest.raises(px.WorkerDiedError) as raised:
        group.die(1, how)

    (cause,) = raised.value.causes
    assert cause.rank == 1
    assert ended_by in (cause.exit or "")
    assert f"rank 1 goes by {how}" in cause.log_tail
    assert f"rank 1 goes by {how}" in str(raised.value)
    assert cause.pid is not None
    assert cause.host
    assert group.state == "broken"


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_the_death_of_an_idle_rank_is_found_in_2_s_without_a_call(group: px.WorkerGroup, signum: int) -> None:
    faults.kill(group, 3, signum)

    assert within(2.0, lambda: group.state == "broken")
    with pytest.raises(px.GroupBroken) as raised:
        group.ping()
    assert isinstance(raised.value.cause, px.WorkerDiedError)
    assert raised.value.cause.cause_ranks == (3,)


@pytest.mark.slow
def test_a_missed_deadline_reports_the_state_of_each_rank_and_breaks_the_group(group: px.WorkerGroup) -> None:
    faults.slow(group, 1, 30.0, method="ping")

    with taking_less_than(2.0), pytest.raises(px.CallTimeout) as raised:
        group.ping.options(timeout=1.0)(*())

    by_rank = {report.rank: report for report in raised.value.failures}
    assert [by_rank[rank].state for rank in range(4)] == ["finished", "running", "finished", "finished"]
    assert "in wrapper" in by_rank[1].stack
    assert (by_rank[1].since or 0.0) > 0.5
    assert group.state == "broken"


def test_result_with_a_timeout_reports_and_leaves_the_call_running(
    group: px.WorkerGroup, tmp_path: Path
) -> None:
    first, second = group.hold.submit(str(tmp_path / "gate")), group.ping.submit()
    assert within(30.0, lambda: all_running(group))

    with pytest.raises(px.CallTimeout) as running:
        first.result(timeout=0.1)
    with pytest.raises(px.CallTimeout) as queued:
        second.result(timeout=0.1)
    (tmp_path / "gate").touch()

    assert {report.state for report in running.value.failures} == {"running"}
    assert "in hold" in running.value.failures[0].stack
    assert {report.state for report in queued.value.failures} == {"queued"}
    assert first.result() == [0, 1, 2, 3]
    assert second.result() == [0, 1, 2, 3]
    assert group.state == "ready"


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["fetched together", "waited for separately"])
def test_gather_raises_the_first_error_or_at_its_timeout_while_another_call_runs(
    group: px.WorkerGroup, tmp_path: Path, timeout: float | None
) -> None:
    late = group[0].hold.options(timeout=timeout).submit(str(tmp_path / "gate"))
    with pytest.raises(ValueError, match="size 3"):
        px.gather(late, group[1].refuse.submit(3), timeout=30.0)
    with pytest.raises(px.CallTimeout):
        px.gather(late, group[1].ping.submit(), timeout=0.1)

    assert not late.done()
    (tmp_path / "gate").touch()
    assert px.gather(late, group[1].ping.submit()) == [0, 1]


def test_ctrl_c_ends_the_wait_for_a_call_but_not_the_call(group: px.WorkerGroup, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    threading.Thread(target=lambda: within(30.0, lambda: all_running(group)) and interrupt_main()).start()
    with pytest.raises(KeyboardInterrupt):
        group.run(lambda worker: (worker.hold(gate), worker.load(7)))
    loaded = group.what_is_loaded.submit()
    with pytest.raises(px.CallTimeout):
        loaded.result(timeout=0.1)
    (tmp_path / "gate").touch()

    assert (loaded.result(), group.state) == ([7] * 4, "ready")


@pytest.mark.slow
def test_stacks_include_native_code_and_a_stopped_rank_is_reported_unreachable(group: px.WorkerGroup) -> None:
    future = group[0:3].submit("spin_natively")
    assert within(30.0, lambda: all_running(group, 3))
    faults.stop(group, 2)

    with taking_less_than(1.5), pytest.raises(px.CallTimeout) as raised:
        future.result(timeout=0.5)

    by_rank = {report.rank: report for report in raised.value.failures}
    assert by_rank[0].state == by_rank[1].state == "running"
    assert "in spin_natively" in by_rank[0].stack
    assert by_rank[2].state == "unreachable"
    assert "stopped" in by_rank[2].stack
    group.restart()


@pytest.mark.slow
def test_a_deadline_applies_to_a_call_without_a_waiting_caller(group: px.WorkerGroup) -> None:
    future = group.nap.options(timeout=0.5).submit(30.0)

    assert within(20.0, lambda: group.state == "broken")
    with pytest.raises(px.CallTimeout):
        future.result()


def test_ranks_log_nothing_about_arguments_that_are_results_of_a_failed_call(group: px.WorkerGroup) -> None:
    for _ in range(3):  # a failure keeps the arguments of its call until the next
        with pytest.raises(ValueError, match="size 3"):
            group.run(lambda _, argument: argument, group.refuse.submit(3))
    texts = group.run(lambda _: Path("/proc/self/fd/2").resolve().read_text())
    assert "Unhandled error" not in "".join(texts)


def test_a_stall_is_reported_and_the_call_continues(
    group: px.WorkerGroup, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def told() -> bool:
        texts = [record.getMessage() for record in caplog.records]
        return any("stalled" in text and "in hold" in text for text in texts)

    with caplog.at_level("WARNING", "phalanx"):
        future = group.hold.options(stall_report_after=0.3).submit(str(tmp_path / "gate"))
        assert within(30.0, told)
    (tmp_path / "gate").touch()

    assert future.result() == [0, 1, 2, 3]


def test_cancel_drops_queued_calls_interrupts_running_calls_and_keeps_finished_calls(
    group: px.WorkerGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    over = group.ping.submit()
    over.result()
    running = group.nap.submit(60.0)
    queued, behind = group.ping.submit(), group.ping.submit()  # without a message of their own
    assert within(30.0, lambda: all_running(group))

    assert queued.cancel()
    assert running.cancel()
    assert not over.cancel()
    assert behind.result() == [0, 1, 2, 3]

    with pytest.raises(px.CallCancelled, match="had not begun"):
        queued.result()
    with pytest.raises(px.CallCancelled, match="interrupted while it ran"):
        running.result()
    assert group.state == "ready"
    first, second = group.nap.submit(0.5), group.nap.submit(0.5)
    second.cancel()
    first.result()
    del second  # its error is not read
    assert group.ping() == over.result() == [0, 1, 2, 3]
    assert "Unhandled error" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "seconds", "says"),
    [("reduce", 3.0, "interrupted while it ran"), ("spin_natively", 4.0, "did not end by itself")],
    ids=["in a collective", "in native code"],
)
def test_cancel_ends_ranks_that_do_not_yield_and_breaks_the_group(
    group: px.WorkerGroup, method: str, seconds: float, says: str
) -> None:
    group.join()
    future, inspect = group[0:3].submit(method), group.core.backend.inspect
    inside, native = {"reduce": ("all_reduce", False)}.get(method, (method, True))
    assert within(30.0, lambda: all(inside in one.stack for one in inspect(group.core.endpoints[:3], True)))

    with taking_less_than(seconds):
        assert future.cancel()

    with pytest.raises(px.CallCancelled) as raised:
        future.result()
    assert all(says in report.message for report in raised.value.failures)
    assert ["in spin_natively" in report.stack for report in raised.value.failures] == [native] * 3
    assert group.state == "broken"


@pytest.mark.slow
def test_a_restart_ends_the_processes_and_collectives_work_again(group: px.WorkerGroup) -> None:
    group.join()
    before = group.pid()

    group.restart()

    assert not any(map(is_there, before))
    group.join()
    assert group.reduce() == [4.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [("surrogate", ValueError, r"unexpected file \\udce9"), ("result", px.RemoteCallError, "lock")],
)
def test_results_and_errors_that_cannot_be_sent_are_reported_and_the_rank_survives(
    group: px.WorkerGroup, kind: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        group.throw(kind)

    assert raised.value.cause_ranks == (0, 1, 2, 3)  # type: ignore[attr-defined]
    assert group.ping() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "name"), [("interrupt", "KeyboardInterrupt"), ("group", "BaseExceptionGroup")]
)
def test_a_base_exception_is_reported_with_its_type_and_traceback(
    group: px.WorkerGroup, kind: str, name: str
) -> None:
    with pytest.raises(px.RemoteCallError, match=rf"raised (exceptiongroup\.)?{name}") as raised:
        group.throw(kind)

    report = raised.value.failures[0]
    assert "in throw" in report.traceback
    assert report.pid == group.pid()[report.rank]
    assert "by hand" in report.traceback


@pytest.mark.slow
def test_a_constructor_that_hangs_on_one_rank_fails_the_start_with_its_stack(shared: px.WorkerGroup) -> None:
    with taking_less_than(25.0), pytest.raises(px.CallTimeout, match="constructor") as raised:
        px.WorkerGroup(shared.pool[0:2], Trouble.bind(hang_on=1), start_timeout=12.0)

    assert raised.value.cause_ranks == (1,)
    assert "stuck_here" in raised.value.causes[0].stack
    assert not any(is_there(report.pid or 0) for report in raised.value.failures)


@pytest.fixture
def another(shared: px.WorkerGroup) -> px.WorkerGroup:
    return px.WorkerGroup(shared.pool[0:2], Trouble)


def test_close_ends_whole_process_trees_and_lets_workers_close_first(
    another: px.WorkerGroup, tmp_path: Path
) -> None:
    children = [pid for pids in another.leave_children() for pid in pids]
    ranks = another.pid()
    another[1].note_close(str(tmp_path / "closed"))

    with taking_less_than(4.0):
        another.close()
    another.close()

    assert not [pid for pid in (*ranks, *children) if is_there(pid)]
    assert (tmp_path / "closed").read_text() == "rank 1 closed"


@pytest.mark.slow
def test_close_ends_the_children_of_a_rank_that_died_earlier(another: px.WorkerGroup) -> None:
    children = another[1].leave_children()
    faults.kill(another, 1)
    assert within(2.0, lambda: another.state == "broken")

    another.close()

    assert not [pid for pid in children if is_there(pid)]


@pytest.mark.slow
def test_closing_while_a_call_runs_ends_it_with_group_closed(another: px.WorkerGroup) -> None:
    future = another.nap.submit(60.0)

    with taking_less_than(5.0):
        another.close()

    with pytest.raises(px.GroupClosed):
        future.result()
