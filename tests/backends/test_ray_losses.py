"""Causes of lost ranks, from Ray's exceptions and from files of dead processes."""

from __future__ import annotations

import re

import pytest
from ray.exceptions import ActorDiedError

from phalanx.backends.backend_types import Lost
from phalanx.backends.ray.ray_errors import PostMortem, last_lines, lost_of, with_post_mortem

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: W\n\tpid: 1\n"
WHY = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    ("text", "exit"),
    [
        (DIED + WHY + "Worker exits with an exit code 7. The worker exited.", "exit code 7"),
        (DIED + WHY + "Worker exits with an exit code a reason of yours.", "exit code a reason of yours"),
        (DIED + WHY + "Worker exits with an exit code 1. The process receives a SIGTERM.", "signal SIGTERM"),
        (DIED + WHY + "Worker unexpectedly exits with a connection error code 2. End of file.", None),
        ("The actor is dead because it was killed by `ray.kill`.", None),
    ],
)
def test_the_cause_of_an_exit_is_taken_from_the_text_of_rays_error(text: str, exit: str | None) -> None:
    error = ActorDiedError()
    error.error_msg = text
    lost = lost_of(error)

    assert (lost.exit, lost.intended) == (exit, "ray.kill" in text)


@pytest.mark.parametrize(
    ("left", "exit", "hint"),
    [
        (PostMortem(), "SIGKILL, such as for lack of memory, or os._exit", "^$"),
        (PostMortem(fatal_signal="SIGSEGV"), "^signal SIGSEGV$", "^$"),
        (PostMortem(oom_kills=1), "", "lack of memory"),
    ],
)
def test_a_post_mortem_determines_the_exit_and_the_hint(left: PostMortem, exit: str, hint: str) -> None:
    lost = with_post_mortem(Lost("gone"), left, "/log")

    assert re.search(exit, lost.exit or "") and re.search(hint, lost.hint or "")


def test_a_lost_rank_has_the_last_lines_and_the_stack_that_its_process_wrote(tmp_path: object) -> None:
    path = f"{tmp_path}/worker.out"
    with open(path, "w") as log:
        log.write(":job_id:01\n:actor_name:W\nstep 1\n\nstep 2 without an end")
    left = PostMortem(log_tail=("step 3",), fatal_signal="SIGSEGV", stack="Fatal Python error")

    lost = with_post_mortem(Lost("gone"), left, "/log")

    assert (lost.log_tail, lost.stack) == (("step 3",), "Fatal Python error")
    assert last_lines(path) == ["step 1", "step 2 without an end"], "without what Ray marks its files with"
    assert last_lines("/nowhere/worker.out") == []
