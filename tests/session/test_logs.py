"""Output of ranks on Ray: in a file for each rank, on the driver's terminal, and in errors."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.config import shown_ranks
from phalanx.display.log_merging import Merged
from phalanx.session import output
from tests.support.fault_workers import within


class Talker(px.Worker):
    """Prints in every way."""

    def __init__(self) -> None:
        print("made")

    @px.register
    def same(self) -> None:
        print("the same line")

    @px.register
    def every_way(self) -> None:
        print("by print")
        print("to stderr", file=sys.stderr)
        logging.getLogger("somebody").warning("by logging")
        os.system("echo by a child")
        os.write(1, b"by a library\n")

    @px.register
    def fail(self) -> None:
        raise ValueError("bad")

    @px.register
    def last_words(self) -> None:
        if self.rank == 1:
            print("last words", end="")
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[px.ResourcePool]:
    with px.ResourcePool([4], use_gpu=False, backend="ray") as made:
        yield made


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool, Talker, name="talkers", show_ranks="none")


def log(group: Any, rank: int) -> list[str]:
    endpoint = group.core.endpoints[rank]
    return group.core.backend.read(endpoint, endpoint.facts.log, 0, 1 << 20).decode().splitlines()


def test_the_log_of_a_rank_has_all_of_its_output_and_names_the_rank(group: Any) -> None:
    group.every_way()

    ways = {"made", "by print", "to stderr", "by logging", "by a child", "by a library"}
    assert [ways - set(log(group, rank)) for rank in range(4)] == [set()] * 4
    head = log(group, 2)[0]
    assert head.startswith("# phalanx log: rank 2 of 4, Talker, group 'talkers', epoch 0, host ")


def test_failure_reports_have_the_path_of_the_log_of_their_rank(group: Any) -> None:
    paths = [endpoint.facts.log for endpoint in group.core.endpoints]
    with pytest.raises(px.RemoteCallError) as caught:
        group.fail()

    assert {report.rank: report.log_path for report in caught.value.failures} == dict(enumerate(paths))
    first = caught.value.failures[0].rank
    assert f"log of rank {first}: {paths[first]}" in str(caught.value)


def test_equal_lines_all_reach_any_terminal(pool: px.ResourcePool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    with px.WorkerGroup(pool, Talker, show_ranks="all") as group:
        px.replace_ranks(group, [2], state="none")
        group.run(lambda worker: print("100 % ███ of ü"))
        host = group.core.endpoints[0].facts.slot.host
    shown = [line for line in written.getvalue().decode("latin-1").splitlines() if "made" not in line]
    assert sorted(shown) == [f"[Talker r{rank}@{host}] 100 % ??? of ü" for rank in range(4)]


def test_equal_lines_of_ranks_are_shown_once_with_their_ranks_if_output_is_merged(
    pool: px.ResourcePool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_WINDOW_S", 600.0)
    with px.WorkerGroup(pool, Talker, show_ranks="merged") as group:
        group.same()
        host = group.core.endpoints[0].facts.slot.host
    shown = capsys.readouterr().out.splitlines()

    assert shown == [f"[Talker r0-3@{host}] {line}" for line in ("made", "the same line")]


def test_the_driver_shows_rank_0_and_an_error_has_the_last_line_of_a_dead_rank(
    pool: px.ResourcePool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dies(px.Worker):
        def __init__(self) -> None:
            print("about to go")
            os._exit(3)

    with px.WorkerGroup(pool, Talker) as group:
        group.same()
        with pytest.raises(px.WorkerDiedError) as caught:
            group.last_words()
    with pytest.raises(px.WorkerDiedError) as starting:
        px.WorkerGroup(pool, Dies, show_ranks="none")
    shown = capsys.readouterr().out

    assert (shown.count("the same line"), "r0@" in shown, "r1@" in shown) == (1, True, False)
    report = caught.value.failures[0]
    assert (report.log_tail[-1], report.log_path) == ("last words", group.core.endpoints[1].facts.log)
    assert starting.value.failures[0].log_tail[-1] == "about to go"


def test_inline_ranks_print_to_the_terminal_without_a_log_or_prefix(
    here: px.ResourcePool, capsys: pytest.CaptureFixture[str]
) -> None:
    group = px.WorkerGroup(here, Talker)
    group.same()

    assert [endpoint.facts.log for endpoint in group.core.endpoints] == [None] * 3
    assert capsys.readouterr().out.splitlines() == ["made"] * 3 + ["the same line"] * 3


@pytest.mark.parametrize("given", ["some", "", -1, [0.5], True, None, {0}])
def test_values_of_show_ranks_that_name_no_ranks_are_refused(given: Any) -> None:
    with pytest.raises(px.DeclarationError, match="show_ranks"):
        shown_ranks(given)


def test_output_of_a_closed_group_is_freed_while_other_groups_are_shown(pool: px.ResourcePool) -> None:
    def kept() -> int:
        return sum(isinstance(one, Merged) for one in gc.get_objects())

    with px.WorkerGroup(pool[0:1], Talker):
        before = kept()
        px.WorkerGroup(pool[1:2], Talker).close()

        assert within(30.0, lambda: kept() == before)  # after the current poll
