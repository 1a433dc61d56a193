"""Every error survives pickling with its text, its fields and its cause."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from ray.exceptions import RayTaskError

from phalanx import errors
from phalanx.errors import (
    CallCancelled,
    CallError,
    CallTimeout,
    DispatchError,
    GroupBroken,
    GroupError,
    InternalError,
    PhalanxError,
    RankReport,
    RemoteCallError,
    StaleEpoch,
    WorkerDiedError,
)

CAUSE = RankReport(rank=2, kind="raised", host="node-a", pid=7, type_name="ValueError", message="bad")
VICTIM = RankReport(rank=0, kind="raised", victim=True, type_name="RuntimeError")
FINISHED = RankReport(rank=1, kind="timeout", state="finished")


def subclasses(cls: type[PhalanxError]) -> list[type[PhalanxError]]:
    own = [
        sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__ and "[" not in sub.__name__
    ]
    return own + [deeper for sub in own for deeper in subclasses(sub)]


ALL = [PhalanxError, *subclasses(PhalanxError)]


def make(cls: type[PhalanxError]) -> PhalanxError:
    if issubclass(cls, CallError):
        return cls("text", group="actor", method="update", failures=(CAUSE, VICTIM, FINISHED))
    if issubclass(cls, GroupError):
        return cls("text", group="actor")
    return cls("text")


@pytest.mark.parametrize("cls", ALL)
def test_an_error_pickles_with_type_text_and_fields(cls: type[PhalanxError]) -> None:
    error = make(cls)

    copied = pickle.loads(pickle.dumps(error))

    assert (type(copied), str(copied)) == (cls, str(error))
    assert (copied.args, vars(copied)) == (error.args, vars(error))


@pytest.mark.parametrize("cls", ALL)
def test_an_error_is_in_the_docstring_that_draws_the_tree(cls: type[PhalanxError]) -> None:
    assert cls.__name__ in (errors.__doc__ or "")


def test_an_error_copies_and_pickles_its_notes_also_with_another_init() -> None:
    error = Picky(1, 2)
    error.__notes__ = ["a note"]
    copied = pickle.loads(pickle.dumps(error))

    assert (str(copied), copied.__notes__) == ("1 and 2", ["a note"])
    assert str(copy.copy(make(RemoteCallError))) == "text"


class Picky(DispatchError):
    def __init__(self, left: int, right: int) -> None:
        DispatchError.__init__(self, f"{left} and {right}")


def test_a_broken_group_carries_its_cause_across_pickling() -> None:
    broken = GroupBroken("broken", group="actor", cause=make(WorkerDiedError))

    copied = pickle.loads(pickle.dumps(broken))

    assert isinstance(copied.cause, WorkerDiedError)
    assert copied.cause.failures == (CAUSE, VICTIM, FINISHED)


@pytest.mark.parametrize("cls", ALL)
def test_an_error_of_a_driver_that_is_an_actor_is_of_its_own_class_elsewhere(cls: type[PhalanxError]) -> None:
    task = RayTaskError("run", "the traceback", make(cls), pid=1, ip="192.0.2.1")

    assert isinstance(task.as_instanceof_cause(), cls)


def test_a_timeout_is_a_timeout_error_with_its_seconds_and_a_stale_epoch_names_both_epochs() -> None:
    late = pickle.loads(pickle.dumps(CallTimeout("late", group="g", method="m", timeout=2.5)))
    stale = pickle.loads(pickle.dumps(StaleEpoch("old", group="g", epoch=1, current=3)))

    assert isinstance(late, TimeoutError)
    assert (late.timeout, stale.epoch, stale.current) == (2.5, 1, 3)


def test_an_internal_error_asks_for_a_report() -> None:
    assert str(InternalError("impossible")) == (
        "impossible\nThis is a bug in phalanx: please report it with this text."
    )


def test_a_call_error_tells_causes_from_victims_and_from_ranks_that_finished() -> None:
    error = CallCancelled("text", failures=(CAUSE, VICTIM, FINISHED))

    assert (error.ranks, error.cause_ranks, error.victims) == ((0, 2), (2,), (0,))


def test_a_report_leaves_its_live_exception_behind_when_pickled_and_is_equal_without_it() -> None:
    report = RankReport(rank=1, kind="raised", exception=ValueError(lambda: None))
    copied = pickle.loads(pickle.dumps(report))

    assert copied.exception is None
    assert copied == report == RankReport(1, "raised", exception=KeyError())


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (RankReport(2, "raised"), "rank 2"),
        (RankReport(2, "raised", host="h", pid=1, accelerator="GPU 5"), "rank 2 (host h, pid 1, GPU 5)"),
        (RankReport(-1, "raised", pid=4), "a process without a rank (pid 4)"),
    ],
)
def test_a_report_says_where_in_words(report: RankReport, words: str) -> None:
    assert report.where() == words


DIED = RankReport(rank=1, kind="died", exit="signal SIGKILL")


def of(*reports: RankReport) -> CallError:
    return CallError("text", group="actor", method="update", failures=reports)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (of(DIED, VICTIM), True),
        (of(CAUSE, VICTIM), False),
        (of(RankReport(0, "raised", exception=of(DIED))), True),
        (of(CAUSE, replace(DIED, victim=True)), False),
        (of(RankReport(0, "raised", type_name="phalanx.errors.WeightsTransferError")), True),
        (of(RankReport(0, "raised", type_name="phalanx.errors.WeightsVerificationError")), False),
        (of(RankReport(0, "raised", type_name="phalanx.errors.ArgumentLost")), True),
        (of(RankReport(0, "raised", type_name="RuntimeError", cut_off=True)), True),
        (CallTimeout("text", failures=(RankReport(0, "timeout", state="running"),)), False),
        (GroupBroken("text", cause=of(DIED)), True),
        (GroupBroken("text", cause=of(CAUSE)), False),
        (GroupBroken("text"), False),
        (StaleEpoch("text"), True),
        (DispatchError("text"), False),
        (PhalanxError("text"), False),
    ],
)
def test_an_error_says_whether_a_process_was_lost_on_both_sides_of_a_pickle(
    error: PhalanxError, lost: bool
) -> None:
    assert (error.lost, pickle.loads(pickle.dumps(error)).lost) == (lost, lost)
