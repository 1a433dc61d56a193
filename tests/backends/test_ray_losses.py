"""Ray's exceptions, and what processes leave, as causes in words."""

from __future__ import annotations

import re

import pytest
from ray.exceptions import ActorDiedError

from phalanx.backends.backend_types import Lost
from phalanx.backends.ray.ray_errors import PostMortem, last_lines, lost_of, with_post_mortem

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: W\n\tpid: 1\n"
WHY = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


def died(text: str) -> Lost:
    error = ActorDiedError()
    error.error_msg = text
    return lost_of(error)


@pytest.mark.parametrize(
    ("detail", "exit"),
    [
        ("Worker exits unexpectedly. Worker exits with an exit code 7. The worker exited.", "exit code 7"),
        (
            "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.",
            "signal SIGTERM",
        ),
        ("Worker unexpectedly exits with a connection error code 2. End of file.", None),
    ],
)
def test_an_exit_is_told_as_far_as_ray_tells_it(detail: str, exit: str | None) -> None:
    lost = died(DIED + WHY + detail)

    assert lost.exit == exit
    assert not lost.intended


def test_a_kill_by_the_owner_is_intended() -> None:
    assert died("The actor is dead because it was killed by `ray.kill`.").intended


def test_an_end_without_a_known_signal_says_what_it_may_have_been() -> None:
    lost = with_post_mortem(Lost("gone"), PostMortem(), "/log")

    assert lost.exit is not None
    assert "SIGKILL" in lost.exit
    assert "os._exit" in lost.exit


def test_a_crash_is_told_by_what_the_interpreter_wrote() -> None:
    left = PostMortem(
        log_tail=("step 3",), fatal_signal="SIGSEGV", stack="Fatal Python error: Segmentation fault"
    )

    lost = with_post_mortem(Lost("gone"), left, "/log")

    assert lost.exit == "signal SIGSEGV"
    assert lost.log_tail == ("step 3",)
    assert "Fatal" in lost.stack


@pytest.mark.parametrize(
    ("left", "hint"),
    [
        (PostMortem(oom_kills=1), "want of memory"),
        (PostMortem(memory=6 * 2**30, node_memory=8 * 2**30), "6.0 GiB.*OOM killer"),
    ],
)
def test_a_want_of_memory_is_hinted_at(left: PostMortem, hint: str) -> None:
    assert re.search(hint, with_post_mortem(Lost("gone"), left, None).hint or "")


def test_a_rank_that_held_little_gets_no_memory_hint() -> None:
    assert with_post_mortem(Lost("gone"), PostMortem(memory=2**30, node_memory=8 * 2**30), None).hint is None


def test_last_lines_leave_out_what_ray_marks_its_files_with(tmp_path: object) -> None:
    path = f"{tmp_path}/worker.out"
    with open(path, "w") as log:
        log.write(":job_id:01\n:actor_name:W\nstep 1\n\nstep 2 without an end")

    assert last_lines(path) == ["step 1", "step 2 without an end"]


def test_a_log_that_is_not_there_has_no_lines() -> None:
    assert last_lines("/nowhere/worker.out") == []
