"""Profiles of the next calls of some ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import phalanx as px
from phalanx.testing import faults

SLOW_ON_RAY = True


class Profiled(px.Worker):
    @px.register
    def multiply(self, size: int) -> int:
        x = torch.ones(size, size)
        return int((x @ x)[0, 0])

    @px.register
    def add(self) -> int:
        return int((torch.ones(3) + 1).sum())

    @px.register
    def fail(self) -> None:
        torch.ones(2).cos()
        raise ValueError("on purpose")


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Any:
    return px.WorkerGroup(pool, Profiled, name="profiled")


def inline(cls: Any = Profiled, **options: Any) -> Any:
    """Return an inline group for tests that do not depend on the backend."""
    pool = px.ResourcePool([2], use_gpu=False, backend="inline")
    return px.WorkerGroup(pool, cls, **options)


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def ranges(path: Path) -> list[str]:
    """Return the names of the ranges in a trace, in order."""
    spans = [event for event in events(path) if event.get("cat") == "user_annotation" and event["ph"] == "X"]
    return [event["name"] for event in sorted(spans, key=lambda event: event["ts"])]


def test_a_profile_records_the_requested_number_of_blocking_or_submitted_calls(
    group: Any, tmp_path: Path
) -> None:
    with group.profile(ranks=[1], calls=3, folder=tmp_path) as profile:
        for _ in range(5):
            group.multiply(4)
    submitted = group.profile(ranks=[0], calls=2)
    futures = [group.multiply.submit(3) for _ in range(2)]

    assert [path.name for path in tmp_path.iterdir()] == ["profiled-rank1.pt.trace.json.gz"]
    assert profile.paths == (tmp_path / "profiled-rank1.pt.trace.json.gz",)
    assert ranges(profile.paths[0]) == ["multiply"] * 3
    found = {(event.get("cat"), event.get("name")) for event in events(profile.paths[0])}
    assert ("cpu_op", "aten::mm") in found
    assert ranges(submitted.paths[0]) == ["multiply"] * 2  # ``paths`` waits for the calls
    assert [future.result()[0] for future in futures] == [3, 3]


def test_a_profile_has_the_options_of_the_profiler_and_excludes_another_profile(group: Any) -> None:
    profile = group.profile(record_shapes=True)
    with pytest.raises(px.DeclarationError, match="already running in this process"):
        group.profile(ranks=[0])
    group.multiply(7)

    assert str(profile.paths[0]) in str(profile)
    (product,) = [event for event in events(profile.paths[0]) if event.get("name") == "aten::mm"]
    assert product["args"]["Input Dims"] == [[7, 7], [7, 7]]


def fail(group: Any) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        group.fail()
    group.add()


@pytest.mark.parametrize(
    ("work", "calls", "named", "notes"),
    [
        (lambda group: group.run(lambda worker: worker.rank), 1, ["run"], ()),
        (lambda group: group.add(), 3, ["add"], ("rank 3: 1 of 3 calls were made",)),
        (lambda group: None, 1, [], ("rank 3: 0 of 1 calls were made",)),
        (fail, 2, ["fail", "add"], ("rank 3: fail: ValueError was raised",)),
    ],
)
def test_a_profile_records_the_calls_that_were_made_and_notes_missing_or_failed_calls(
    group: Any, work: Any, calls: int, named: list[str], notes: tuple[str, ...]
) -> None:
    with group.profile(ranks=[3], calls=calls) as profile:
        work(group)

    assert [ranges(path) for path in profile.paths] == ([named] if named else [])
    assert (profile.calls[3], profile.notes) == (tuple(named), notes)


@pytest.mark.slow_on_cluster
def test_a_profile_keeps_the_trace_of_a_group_that_is_closed_first(pool: px.ResourcePool) -> None:
    with px.WorkerGroup(pool[0:2], Profiled) as short:
        profile = short.profile(ranks=[1], calls=3)
        short.add()

    assert ranges(profile.paths[0]) == ["add"]


def test_profiles_of_roles_name_their_calls_and_files_by_role(tmp_path: Path) -> None:
    with inline(px.colocate({"actor": Profiled, "critic": Profiled}), name="g") as roles:
        with roles.profile(calls=2) as both:
            roles.actor.add()
            roles.critic.add()
        with roles.critic.profile() as one:
            roles.actor.add()
            roles.critic.multiply(2)
        for role in (roles.actor, roles.critic, roles.actor):
            with role.profile(folder=tmp_path) as profile:
                role.add()
            assert ranges(profile.paths[0]) == [f"{role.role}.add"]

    assert ranges(both.paths[0]) == ["actor.add", "critic.add"]
    assert one.calls == {0: ("critic.multiply",)}
    names = ["g.actor-rank0.2", "g.actor-rank0", "g.critic-rank0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.pt.trace.json.gz" for name in names]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_profile_with_an_unavailable_tool_is_refused_with_advice(group, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(px.DeclarationError, match=r"runtime_env=px.debug.nsight_environment\(\)"):
        group.profile(tool="nsys")
    assert not [*tmp_path.iterdir()]
    with group.profile(ranks=0) as profile:  # the refused profile has left nothing
        group.add()
    assert profile.calls == {0: ("add",)}


def test_a_profile_of_asynchronous_ranks_or_of_two_ranks_in_a_process_is_refused() -> None:
    with inline(max_concurrency=2) as many, pytest.raises(px.DeclarationError, match="interleave"):
        many.profile()
    with inline() as two, pytest.raises(px.DeclarationError, match="one rank at a time"):
        two.profile(ranks=[0, 1])


def test_nsight_records_from_the_first_call_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with inline() as one, one.profile(tool="nsys", calls=2) as profile:
        one.add()
        one.multiply(2)
        one.add()

    assert seen == ["start", "add", "pop", "multiply", "pop", "stop"]
    assert profile.paths == ()
    assert "worker_process_" in profile.notes[0]
    options = px.debug.nsight_environment(gpu_metrics_devices="all")["nsight"]
    assert (options["gpu-metrics-devices"], options["capture-range"]) == ("all", "cudaProfilerApi")


def test_a_failing_profiler_loses_its_trace_but_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler.profile, "start", Mock(side_effect=RuntimeError("no profiler today")))
    with inline() as one:
        runtime = one.core.endpoints[0].handle.runtime
        with one.profile() as profile:
            assert runtime.around is not None
            assert one.add() == [6] * 2
        assert runtime.around is None  # later calls run without the profiler
        assert not one.core.before_end

    assert profile.paths == ()
    assert "RuntimeError: no profiler today" in profile.notes[0]


def test_a_trace_that_cannot_be_written_is_a_note_and_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError("disk full")))
    with inline() as one, pytest.raises(KeyError), one.profile() as profile:
        one.add()
        raise KeyError

    assert profile.paths == ()
    assert profile.notes == ("rank 0: its trace was not written: disk full",)


def test_a_killed_inline_rank_frees_the_profiler_for_other_groups() -> None:
    with inline() as lost, inline() as other:
        lost.profile(ranks=[1])
        faults.kill(lost, 1)
        with other.profile() as profile:
            other.add()
    assert profile.calls == {0: ("add",)}
