"""Causes of lost ranks, from files of dead processes."""

from __future__ import annotations

import re

import pytest

from phalanx.backends.backend_types import Lost
from phalanx.backends.ray.ray_errors import PostMortem, last_lines, with_post_mortem


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

    assert re.search(exit, lost.exit or "")
    assert re.search(hint, lost.hint or "")


def test_a_lost_rank_has_the_last_lines_and_the_stack_that_its_process_wrote(tmp_path: object) -> None:
    path = f"{tmp_path}/worker.out"
    with open(path, "w") as log:
        log.write(":job_id:01\n:actor_name:W\nstep 1\n\nstep 2 without an end")
    left = PostMortem(log_tail=("step 3",), fatal_signal="SIGSEGV", stack="Fatal Python error")

    lost = with_post_mortem(Lost("gone"), left, "/log")

    assert (lost.log_tail, lost.stack) == (("step 3",), "Fatal Python error")
    assert last_lines(path) == ["step 1", "step 2 without an end"], "without what Ray marks its files with"
    assert last_lines("/nowhere/worker.out") == []
