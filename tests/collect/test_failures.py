"""From the reports of all ranks to one error: its kind, its causes apart from its victims, its text."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.collect.failures import combine, looks_like_victim, with_victims
from phalanx.collect.message import rank_list
from phalanx.errors import (
    CallCancelled,
    CallError,
    CallTimeout,
    InternalError,
    RankReport,
    RemoteCallError,
    WorkerDiedError,
    WorkerInitError,
)

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in update
    raise ValueError("bad shape")
ValueError: bad shape"""
COLLECTIVE = """  File "/site/torch/distributed/distributed_c10d.py", line 2924 in all_reduce
  File "train.py", line 2 in update"""
BUSY = '  File "train.py", line 9 in update'
CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1234"


def report(rank: int, kind: Any = "raised", **fields: Any) -> RankReport:
    fields = {"method": "update", "host": "h", "pid": 100 + rank, "accelerator": f"GPU {rank}", **fields}
    return RankReport(rank, kind, **fields)


def bad(rank: int, **fields: Any) -> RankReport:
    return report(
        rank, **{"type_name": "ValueError", "message": "bad shape", "traceback": TRACEBACK, **fields}
    )


def gone(rank: int, message: str = CLOSED, **fields: Any) -> RankReport:
    return report(rank, **{"type_name": "RuntimeError", "message": message, **fields})


def died(rank: int, **fields: Any) -> RankReport:
    return report(rank, "died", **{"exit": "signal SIGKILL", **fields})


def stopped(rank: int, **fields: Any) -> RankReport:
    return report(rank, "stopped", message="had not ended", **fields)


def late(rank: int, state: Any = "running", **fields: Any) -> RankReport:
    return report(rank, "timeout", state=state, since=5.0, **fields)


def combined(*reports: RankReport, **options: Any) -> CallError:
    return combine("actor", "update", reports, **options)


@pytest.mark.parametrize(
    ("reports", "options", "kind"),
    [
        ([bad(1), gone(0)], {}, RemoteCallError),
        ([bad(0), died(1)], {}, WorkerDiedError),
        ([late(0), late(1, "finished")], {}, CallTimeout),
        ([late(0), bad(1)], {}, RemoteCallError),
        ([late(0), gone(1)], {}, CallTimeout),
        ([report(0, "cancelled"), gone(1)], {}, CallCancelled),
        ([stopped(0), stopped(1)], {}, CallCancelled),
        ([gone(0), gone(1)], {}, RemoteCallError),
        ([bad(1)], {"init": True}, WorkerInitError),
    ],
)
def test_the_causes_determine_the_type_of_the_error(
    reports: list[RankReport], options: dict[str, Any], kind: type[CallError]
) -> None:
    assert type(combined(*reports, **options)) is kind


@pytest.mark.parametrize(
    "victim",
    [
        gone(0),
        gone(0, "Connection reset by peer"),
        gone(0, "Broken pipe", type_name="torch.distributed.DistNetworkError"),
        gone(0, "NCCL error ... remote process exited", type_name="torch.distributed.DistBackendError"),
        gone(0, "ncclRemoteError: A call failed", type_name="torch.distributed.DistBackendError"),
        gone(0, "NCCL communicator was aborted on rank 0.", type_name="torch.distributed.DistBackendError"),
        gone(0, "[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
        gone(0, "Connection closed by peer", type_name="OSError", traceback=COLLECTIVE),
        bad(0, traceback=f"Traceback:\n  frame\nRuntimeError: {CLOSED}\n\nThe above ...\n\n{TRACEBACK}"),
    ],
)
def test_a_lost_connection_in_a_collective_makes_a_victim(victim: RankReport) -> None:
    assert looks_like_victim(victim)
    assert combined(victim, bad(3)).victims == (0,)


@pytest.mark.parametrize(
    "own",
    [
        bad(0),
        gone(0, "Connection reset by peer", type_name="ConnectionResetError"),
        gone(0, "Connection refused", type_name="requests.exceptions.ConnectionError"),
        gone(0, "mat1 and mat2 shapes cannot be multiplied"),
        died(0, message="connection reset by peer"),
        bad(0, traceback=f'Traceback:\n    log("RuntimeError: {CLOSED}")\n{TRACEBACK}'),
    ],
)
def test_a_rank_with_any_other_error_is_a_cause(own: RankReport) -> None:
    assert not looks_like_victim(own)
    assert combined(own, bad(3)).cause_ranks == (0, 3)


@pytest.mark.parametrize(
    ("reports", "causes", "victims"),
    [
        pytest.param(
            [gone(0, at=2.0), gone(1, at=1.0), stopped(2, at=0.5), gone(3, at=3.0)],
            *((1,), (0, 2, 3)),
            id="the earliest, where all look like victims",
        ),
        pytest.param([gone(0, at=1.0), died(1, at=2.0)], (1,), (0,), id="a death, after a lost connection"),
        pytest.param([died(0, victim=True), bad(1)], (1,), (0,), id="not a death that the library caused"),
        pytest.param(
            [late(0, stack=COLLECTIVE), late(1, stack=BUSY), late(2, "queued")],
            *((1,), (0, 2)),
            id="the rank that is busy, of late ranks",
        ),
        pytest.param(
            [late(0, stack=COLLECTIVE), late(1, "unreachable")], (1,), (0,), id="an unreachable rank"
        ),
        pytest.param(
            [late(0, stack=COLLECTIVE), late(1, stack=COLLECTIVE)],
            (0, 1),
            (),
            id="all late ranks in a collective",
        ),
    ],
)
def test_causes_are_separated_from_victims(
    reports: list[RankReport], causes: tuple[int, ...], victims: tuple[int, ...]
) -> None:
    error = combined(*reports)

    assert (error.cause_ranks, error.victims) == (causes, victims)


def test_a_rank_that_lost_its_peer_in_a_sync_is_a_victim_of_the_error_of_its_peer() -> None:
    lost = {"type_name": "phalanx.errors.WeightsTransferError", "message": "source rank 0 went away"}
    early, late = report(0, at=1.0, **lost), bad(1, at=2.0)
    assert [(each.rank, each.victim) for each in with_victims([early, late])] == [(1, False), (0, True)]
    assert [each.victim for each in with_victims([early, report(1, at=2.0, **lost)])] == [False, False]


@pytest.mark.parametrize(
    ("reports", "order"),
    [
        ([gone(0, at=0.1), bad(1, at=2.0), bad(2, at=1.0), late(3, "finished")], [2, 1, 0, 3]),
        ([bad(2), bad(0), bad(1)], [0, 1, 2]),
    ],
    ids=["by time", "without times by rank"],
)
def test_causes_come_first_and_the_earliest_cause_before_other_causes(
    reports: list[RankReport], order: list[int]
) -> None:
    assert [failure.rank for failure in combined(*reports).failures] == order


kinds = st.sampled_from([bad, gone, died, stopped, late, lambda rank, **more: late(rank, "finished", **more)])
many_reports = st.lists(st.tuples(kinds, st.none() | st.floats(0, 9)), min_size=1, max_size=9).map(
    lambda drawn: [make(rank, at=at) for rank, (make, at) in enumerate(drawn)]
)


@given(many_reports, st.randoms())
def test_reports_in_any_order_have_a_cause_and_give_one_error_that_can_be_pickled(
    reports: list[RankReport], random: Any
) -> None:
    marked = with_victims(reports)
    assert sorted(each.rank for each in marked) == list(range(len(reports)))
    assert any(each.failed for each in reports) == any(each.failed and not each.victim for each in marked)
    assert with_victims(random.sample(reports, len(reports))) == marked

    try:
        error = combined(*reports, timeout=5.0)
    except InternalError:
        assert not any(each.failed for each in reports)
        return
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied), copied.failures) == (type(error), str(error), error.failures)


def test_the_text_has_the_cause_its_traceback_its_log_and_its_victims() -> None:
    cause = bad(2, log_tail=("step 1", "step 2"), log_path="/logs/2.out")

    text = str(combined(gone(0), gone(1), cause, stopped(3)))

    assert text == (
        "group 'actor', method update: rank 2 (host h, pid 102, GPU 2) raised ValueError: bad shape\n"
        "\n"
        "remote traceback of rank 2:\n"
        "  Traceback (most recent call last):\n"
        '    File "train.py", line 3, in update\n'
        '      raise ValueError("bad shape")\n'
        "  ValueError: bad shape\n"
        "\n"
        "last lines logged by rank 2 (/logs/2.out):\n"
        "  step 1\n"
        "  step 2\n"
        "\n"
        "failed because of that:\n"
        f"  ranks 0-1 (host h) raised RuntimeError: {CLOSED}\n"
        "  rank 3 (host h, pid 103, GPU 3) was stopped: had not ended"
    )


WHERE = "rank 1 (host h, pid 101, GPU 1)"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (combined(bad(1, role="critic")), f"method critic.update: {WHERE} raised"),
        (combine("actor", "__init__", [bad(1)], init=True), f"constructor: {WHERE} raised"),
        (combine("actor", "__phalanx_run__", [bad(1)]), "method run: rank 1"),
        (combined(bad(0, host="a"), bad(1, host="b")), "method update: ranks 0-1 (2 hosts) raised"),
        (
            combined(*(bad(rank, message=f"bad shape {rank}", traceback="") for rank in (0, 1, 2, 5))),
            "method update: ranks 0-2, 5 (host h) raised ValueError: bad shape 0\n\n"
            "  rank 0 (host h, pid 100, GPU 0)\n  rank 1 (host h, pid 101, GPU 1)\n",
        ),
        (
            combined(died(1, at=1.0, hint="out of memory"), bad(2, at=2.0), gone(0)),
            f"method update: {WHERE} died: signal SIGKILL\n"
            "  and rank 2 (host h, pid 102, GPU 2) raised ValueError: bad shape\n\nhint: out of memory\n",
        ),
        (
            combined(bad(1, message="first\nsecond", traceback="")),
            f"method update: {WHERE} raised ValueError: first\n\nfull message of rank 1:\n  first\n  second",
        ),
    ],
)
def test_the_text_begins_with_the_call_the_ranks_and_their_error(error: CallError, text: str) -> None:
    assert str(error).startswith(f"group 'actor', {text}")


def test_the_text_of_a_timeout_explains_how_to_allow_more_time() -> None:
    reports = [late(0, stack=COLLECTIVE), late(1, stack=BUSY), late(2, "finished"), late(3, "queued")]
    text = str(combined(*reports, timeout=5))
    parts = [
        "not done after 5 s: rank 1 (host h, pid 101, GPU 1) was running for 5.0 s\n",
        'stack of rank 1:\n    File "train.py", line 9 in update\n',
        "waiting for that:\n  rank 0 (host h, pid 100, GPU 0) was running",
        "  rank 3 (host h, pid 103, GPU 3) was queued",
        "finished: rank 2\n",
        "call_timeout=",
    ]

    assert sorted(map(text.index, parts)) == [text.index(part) for part in parts]
    start = str(combine("actor", "__init__", [late(0, stack=COLLECTIVE)], timeout=5, init=True))
    assert "start_timeout= for the group" in start
    assert ".options(" not in start


def test_the_text_of_many_ranks_and_long_tracebacks_stays_short() -> None:
    long = "\n".join(f"line {number}" for number in range(5000))
    reports = [bad(rank, message=chr(97 + rank % 20) * 3, traceback=long) for rank in range(4096)]

    assert len(str(combined(*reports))) < 20_000


def test_a_long_list_of_ranks_is_shortened() -> None:
    assert rank_list(range(0, 60, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (30 in all)"
