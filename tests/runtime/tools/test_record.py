"""Recorded calls: files that run one rank's call again, alone, in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.runtime.tools.recording import read_facts


class Recorded(px.Worker):
    def __init__(self, start: int = 0) -> None:
        self.total = torch.zeros(2) + start

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def scale(self, rows: Any) -> Any:
        rows *= 10  # in place: the recorded input is as it was
        return rows + self.rank

    @px.register
    def add(self, amount: float) -> list[float]:
        self.total += amount
        return self.total.tolist()

    @px.register
    def fail_from(self, amount: int) -> int:
        if amount > 2:
            raise KeyError(f"{amount} on rank {self.rank}")
        return amount

    @px.register
    def place(self) -> tuple[int, int, str | None, dict[str, int]]:
        at = self.mesh().coordinates(self.rank)
        return self.rank, self.world_size, os.environ.get("OF_THE_GROUP"), at

    @px.register
    def sum_of_ranks(self) -> float:
        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    @px.register
    async def later(self, x: int) -> int:
        return x + self.rank


class Lone(Recorded):
    independent = True


class Loadable:
    def __init__(self) -> None:
        self.made = "by the constructor"
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    @px.register
    def step(self) -> tuple[str, int]:
        self.steps += 1
        return self.made, self.steps


@pytest.fixture(scope="module")
def group(pool: px.ResourcePool) -> Iterator[Any]:
    mesh = px.Mesh(dp=2, tp=2)
    with px.WorkerGroup(pool, Recorded.bind(start=5), mesh=mesh, env={"OF_THE_GROUP": "yes"}) as made:
        yield made


@pytest.fixture
def inline_slots() -> Iterator[px.ResourcePool]:
    """For what does not depend on the backend."""
    with px.ResourcePool([2], use_gpu=False, backend="inline") as slots:
        yield slots


def test_a_call_runs_again_with_the_rows_of_its_rank(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", rank=3) as record:
        result = group.scale(torch.arange(8.0))

    assert record.calls == ("scale",)
    assert torch.equal(px.replay(record.path), result[6:])


def test_a_future_is_recorded_as_its_value(group: Any, tmp_path: Path) -> None:
    future = group.scale.submit(torch.ones(4))
    record = group.record(tmp_path / "call.pkl", rank=1)
    result = group.scale(future)

    assert torch.equal(px.replay(record.path), result[1:2])


def test_the_replayed_worker_knows_its_place(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", rank=2) as record:
        group.place()

    assert px.replay(record.path) == (2, 4, "yes", {"dp": 1, "tp": 0})
    assert "OF_THE_GROUP" not in os.environ


def test_only_calls_of_the_method_count(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", rank=0, method=Recorded.fail_from, calls=2) as record:
        group.fail_from(1)
        group.place()
        group.fail_from(2)

    assert record.calls == ("fail_from", "fail_from")
    assert px.replay(record.path) == 2


def test_the_call_that_raised_is_what_is_recorded(group: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyError), group.record(tmp_path / "call.pkl", rank=1, when="error") as record:
        for amount in range(9):
            group.fail_from(amount)

    assert read_facts(record.path)["calls"][0]["error"] == "KeyError: '3 on rank 1'"
    with pytest.raises(KeyError, match="3 on rank 1"):
        px.replay(record.path)


def test_without_its_state_the_worker_is_as_its_constructor_made_it(group: Any, tmp_path: Path) -> None:
    group.add(100)
    with group.record(tmp_path / "call.pkl") as record:
        group.add(1)

    assert px.replay(record.path) == [6.0, 6.0]


def test_the_state_before_the_call_can_be_recorded(group: Any, tmp_path: Path) -> None:
    group.add(100)
    with group.record(tmp_path / "call.pkl", state=True) as record:
        result = group.add(1)

    assert px.replay(record.path) == result[0]


def test_a_state_dict_is_loaded_into_a_new_worker(inline_slots: px.ResourcePool, tmp_path: Path) -> None:
    with px.WorkerGroup(inline_slots, px.colocate({"one": Loadable, "other": Recorded})) as roles:
        roles.one.step()
        with roles.one.record(tmp_path / "call.pkl", state=True) as record:
            roles.other.add(1)
            roles.one.step()

    assert record.calls == ("one.step",)
    assert px.replay(record.path) == ("by the constructor", 2)


def test_functions_and_async_methods_are_recorded(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", rank=3, calls=2) as record:
        group.later(1)
        group.run(lambda worker, x: worker.rank * x, 5)

    assert record.calls == ("later", "run")
    assert px.replay(record.path) == 15
    assert px.replay(record.path, method="later") == 4


def test_a_collective_says_that_its_peers_are_missing(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", rank=2) as record:
        group.sum_of_ranks.submit().exception()

    with pytest.raises(px.PhalanxError, match="rank 2 of 4 runs alone here"):
        px.replay(record.path)


def test_a_constructor_that_raises_on_replay_raises_as_it_is(
    inline_slots: px.ResourcePool, tmp_path: Path
) -> None:
    class Picky(px.Worker):
        def __init__(self) -> None:
            if "PHALANX_REPLAYED" in os.environ:
                raise LookupError("not here")

        @px.register
        def nothing(self) -> None:
            return None

    with px.WorkerGroup(inline_slots, Picky) as picky, picky.record(tmp_path / "call.pkl") as record:
        picky.nothing()

    with pytest.raises(LookupError, match="not here"):
        px.replay(record.path)


@pytest.mark.slow_on_cluster
def test_restarting_the_group_first_writes_the_file(pool: px.ResourcePool, tmp_path: Path) -> None:
    with px.WorkerGroup(pool[0:2], Recorded) as group:
        record = group.record(tmp_path / "call.pkl", rank=1, calls=2)
        group.add(1.0)
        group.restart()
        assert (record.wait(), record.calls) == (tmp_path / "call.pkl", ("add",))


def test_a_rank_that_was_let_go_has_recorded_nothing_to_be_had(
    inline_slots: px.ResourcePool, tmp_path: Path
) -> None:
    with px.WorkerGroup(inline_slots, Lone) as group:
        record = group.record(tmp_path / "call.pkl", rank=1)
        px.resize(group, 1)
        assert record.wait() is None
        assert "rank 1 is gone" in str(record)


@pytest.mark.slow_on_cluster
def test_closing_the_group_first_writes_the_file(pool: px.ResourcePool, tmp_path: Path) -> None:
    with px.WorkerGroup(pool[0:2], Recorded) as short:
        record = short.record(tmp_path / "call.pkl", rank=1)
        short.add(3)

    assert record.path == tmp_path / "call.pkl"
    assert px.replay(tmp_path / "call.pkl") == [3.0, 3.0]


def test_no_call_leaves_no_file(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", rank=1, when="error") as record:
        group.place()

    assert (record.path, record.notes) == (None, ("no call raised on rank 1",))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_recorded_does_not_harm_the_call(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl", state=True) as record:
        group.run(lambda worker: setattr(worker, "lock", __import__("threading").Lock()))
        group.place()
    with group.record(tmp_path / "call.pkl", state=True) as spoilt:
        assert group.place()[3][0] == 3
    group.run(lambda worker: delattr(worker, "lock"))

    assert record.path is not None
    assert "the state before place could not be recorded" in spoilt.notes[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\x80\x05K\x01.", "no recorded call"),
        (b"\x93phalanx-call\n\x09\x00" + bytes(8), "recorded in format 9"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "other.pkl"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(px.DeclarationError, match=message):
        px.replay(path)


def test_a_file_that_was_cut_short_is_refused(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl") as record:
        group.place()
    whole = record.path.read_bytes()
    record.path.write_bytes(whole[:-40])

    with pytest.raises(px.DeclarationError, match="cut short"):
        px.replay(record.path)


def test_calls_that_are_not_in_the_file_are_refused(group: Any, tmp_path: Path) -> None:
    with group.record(tmp_path / "call.pkl") as record:
        group.place()

    with pytest.raises(px.DeclarationError, match="no call of 'add' in it; it has: place"):
        px.replay(record.path, method="add")


def test_only_the_owner_of_a_group_records(group: Any, tmp_path: Path, backend: str) -> None:
    if backend == "inline":
        pytest.skip("inline groups do not travel")
    import cloudpickle

    view = cloudpickle.loads(cloudpickle.dumps(group))
    with pytest.raises(px.DeclarationError, match="only the owner"):
        view.record(tmp_path / "call.pkl")


@pytest.mark.parametrize("given", [{"rank": 9}, {"calls": 0}, {"method": "nothing"}])
def test_wrong_requests_are_refused(group: Any, tmp_path: Path, given: Any) -> None:
    with pytest.raises(px.DispatchError):
        group.record(tmp_path / "call.pkl", **given)


class Waiting(px.Worker):
    """Rank 1 raises while the others wait for it, which breaks the group."""

    @px.register
    def meet(self, x: int) -> int:
        dist.init_process_group("gloo")
        if self.rank == 1:
            raise ValueError(f"bad {x}")
        dist.barrier()
        return x


@pytest.mark.slow
def test_the_call_that_broke_the_group_is_recorded(ray_cluster: None, tmp_path: Path) -> None:
    with (
        px.ResourcePool([2], use_gpu=False, backend="ray") as slots,
        px.WorkerGroup(slots, Waiting) as broken,
    ):
        with (
            pytest.raises(ValueError, match="bad 7"),
            broken.record(tmp_path / "call.pkl", rank=1, when="error", state=True) as record,
        ):
            broken.meet(7)

        assert broken.state == "broken"
        assert record.calls == ("meet",)
    with pytest.raises(px.PhalanxError, match="rank 1 of 2 runs alone here"):
        px.replay(record.path)
