"""Groups: options, roles, collectives, serialized views, asynchronous ranks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

import phalanx as px

BY_VALUE = True
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


class Actor(px.Worker):
    """Starts a process group in its constructor, as trainers do."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr
        if self.world_size == 1 or os.environ["PHALANX_STORE"] != "inline":
            dist.init_process_group("gloo")

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def update(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": batch["x"] * 2, "note": batch["note"]}

    @px.register
    def sum_of_ranks(self) -> float:
        value = torch.ones(1) * self.rank
        dist.all_reduce(value)
        return value.item()

    @px.register
    def second_world(self) -> float:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return self.sum_of_ranks()

    @px.register
    def sibling_value(self) -> int:
        return self.roles["critic"].value

    @px.register
    def pid(self) -> int:
        return os.getpid()


class Critic:
    """A plain class, not a px.Worker."""

    def __init__(self, value: int) -> None:
        self.value = value

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def values(self, batch: dict[str, Any]) -> Any:
        return batch["x"] * self.value

    @px.register
    def pid(self) -> int:
        return os.getpid()


class Plain(px.Worker):
    def __init__(self) -> None:
        self.waiting = asyncio.Event()

    @px.register
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    async def same_later(self, rows: Any) -> Any:
        await asyncio.sleep(0)
        return rows

    @px.register
    async def fail_later(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("later")

    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def same(self, rows: Any) -> Any:
        return rows

    @px.register
    def ask(self, group: Any) -> Any:
        return group.variable("RANK")

    @px.register
    async def wait_for_release(self) -> str:
        await self.waiting.wait()
        return "released"

    @px.register
    async def release(self) -> None:
        self.waiting.set()

    @px.register
    def join_collective(self) -> None:
        dist.init_process_group("gloo")


@pytest.fixture(scope="module")
def colocated(ray_cluster: None) -> Iterator[Any]:
    with px.ResourcePool([2], use_gpu=True, backend="ray") as pool:
        roles = {"actor": Actor.bind(lr=1.0), "critic": px.BoundClass(Critic, 3)}
        yield px.WorkerGroup(pool, px.colocate(roles))


@pytest.fixture(scope="module")
def plain(backend: str) -> Iterator[Any]:
    with px.ResourcePool([3], use_gpu=False) as pool:
        env = {"OF_THE_GROUP": "yes", "OMP_NUM_THREADS": "3"}
        never = {"start_timeout": float("inf"), "call_timeout": float("inf")}
        yield px.WorkerGroup(pool, Plain, env=env, name="plain", **never)


def test_colocated_roles_share_a_process_see_each_other_and_are_called_as_groups(colocated: Any) -> None:
    assert colocated.actor.pid() == colocated.critic.pid()
    assert colocated.actor.sibling_value() == [3, 3]
    assert set(colocated.spawn()) == {"actor", "critic"}
    out = colocated.actor.update({"x": torch.arange(5), "note": "kept"})
    assert out["x"].tolist() == [0, 2, 4, 6, 8]
    assert out["note"] == "kept"
    assert colocated.critic.values({"x": out["x"]}).tolist() == [0, 6, 12, 18, 24]


def test_an_unknown_role_or_method_is_refused_with_the_known_names(colocated: Any) -> None:
    with pytest.raises(AttributeError, match="actor, critic"):
        _ = colocated.reward
    with pytest.raises(AttributeError, match=r"actor, critic \(a rank: group\.actor\[0\]\)"):
        _ = colocated[0].critic
    with pytest.raises(AttributeError, match="did you mean 'update'"):
        _ = colocated.actor.updat
    with pytest.raises(AttributeError, match=r"Call group\.critic\.call\('values', \.\.\.\)"):
        colocated.call("values")
    with pytest.raises(AttributeError, match="None of them has a method 'valuez'"):
        colocated.call("valuez")


def test_a_second_process_group_forms_after_the_first_was_destroyed(colocated: Any) -> None:
    assert colocated.actor.second_world() == [1.0, 1.0]
    assert colocated.actor.second_world() == [1.0, 1.0]


def test_two_groups_on_the_same_slots_have_two_process_groups_and_explain_lists_both(colocated: Any) -> None:
    neighbour = px.WorkerGroup(colocated.pool, Actor, name="neighbour")
    assert neighbour.sum_of_ranks() == colocated.actor.sum_of_ranks() == [1.0, 1.0]
    assert set(neighbour.pid()).isdisjoint(colocated.actor.pid())
    text = str(colocated.explain())
    assert "colocated in one process per rank: actor, critic" in text
    assert "processes of their own: neighbour" in text


def test_ranks_of_a_pool_share_its_cores_unless_omp_num_threads_is_set(
    here: px.ResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    one, others = px.WorkerGroup(here[0:1], Plain), px.WorkerGroup(here[1:3], Plain)
    assert [*one.variable("OMP_NUM_THREADS"), *others.variable("OMP_NUM_THREADS")] == ["2"] * 3
    monkeypatch.setenv("OMP_NUM_THREADS", "11")
    inherits = px.WorkerGroup(here, Plain)
    chooses = px.WorkerGroup(here, Plain, env={"OMP_NUM_THREADS": "3"})
    assert inherits.variable("OMP_NUM_THREADS") == ["11"] * 3
    assert chooses.variable("OMP_NUM_THREADS") == ["3"] * 3
    of_group = {"env_vars": {"OMP_NUM_THREADS": "7", "BOTH": "from the runtime_env"}}
    group = px.WorkerGroup(here[0:1], Plain, runtime_env=of_group, env={"BOTH": "from env"})
    assert group.variable("OMP_NUM_THREADS") == ["7"]
    assert group.variable("BOTH") == ["from env"]


OF_A_CLUSTER = """
import os
import phalanx as px


class Plain(px.Worker):
    @px.register
    def threads(self):
        return os.environ["OMP_NUM_THREADS"]


px.init(num_cpus=2)
with px.ResourcePool([1], use_gpu=False) as pool, px.WorkerGroup(pool, Plain) as group:
    print(*group.threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["11", pytest.param(None, marks=pytest.mark.soak)])
def test_ranks_on_ray_use_the_omp_num_threads_of_the_cluster_or_all_cores(chosen: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"RAY_ADDRESS": "local"} | ({"OMP_NUM_THREADS": chosen} if chosen else {})

    driver = [sys.executable, "-c", OF_A_CLUSTER]
    ran = subprocess.run(driver, env=env, capture_output=True, text=True, timeout=240)

    assert ran.stdout.split()[-1] == (chosen or str(len(os.sched_getaffinity(0)))), ran.stderr


@pytest.mark.slow
def test_a_ray_actor_can_be_the_driver(ray_cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Driver:
        def drive(self) -> Any:
            import phalanx

            with phalanx.ResourcePool([2], use_gpu=False, backend="ray") as pool:
                return phalanx.WorkerGroup(pool, Plain).variable("RANK")

    assert ray.get(Driver.remote().drive.remote(), timeout=100) == ["0", "1"]


class Closing(px.Worker):
    """Ends a task of its event loop in ``close()``."""

    @px.register
    async def begin(self, path: str) -> None:
        self.path, self.stop = path, asyncio.Event()
        self.task = asyncio.create_task(self.stop.wait())

    async def close(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 3)
        Path(self.path).write_text("closed")


@pytest.mark.slow
def test_an_asynchronous_rank_closes_on_its_own_event_loop(asynchronous: Any, tmp_path: Path) -> None:
    group = px.WorkerGroup(asynchronous.pool[0:1], Closing, max_concurrency=4)
    group.begin(str(tmp_path / "closed"))
    group.close()

    assert (tmp_path / "closed").read_text() == "closed"


@pytest.fixture(scope="module")
def asynchronous(ray_cluster: None) -> Iterator[Any]:
    with px.ResourcePool([2], use_gpu=False, backend="ray") as pool:
        yield px.WorkerGroup(pool, Plain, max_concurrency=8)


def test_a_worker_calls_another_group_through_a_view(asynchronous: Any) -> None:
    callee, caller = px.WorkerGroup(asynchronous.pool, Plain), px.WorkerGroup(asynchronous.pool[0:1], Plain)
    assert caller.ask(callee) == [["0", "1"]]
    assert caller.ask(callee[1]) == ["1"]
    callee.close()
    with pytest.raises(px.RemoteCallError, match="GroupClosed"):
        caller.ask(callee)


def test_asynchronous_ranks_interleave_at_awaits(asynchronous: Any) -> None:
    waiting = asynchronous.wait_for_release.submit()
    asynchronous.release()
    assert waiting.result(timeout=60) == ["released", "released"]


def test_the_traceback_of_an_async_method_shows_only_its_own_error(plain: Any) -> None:
    with pytest.raises(KeyError) as caught:
        plain.fail_later()

    traceback = caught.value.failures[0].traceback  # type: ignore[attr-defined]
    assert "in fail_later" in traceback
    assert "no running event loop" not in traceback


@pytest.mark.parametrize("method", ["same", "same_later"])
def test_asynchronous_ranks_take_futures_of_their_own_earlier_calls(asynchronous: Any, method: str) -> None:
    rows = torch.arange(4)
    for _ in range(3):
        future = getattr(asynchronous, method).submit(rows)
        for _ in range(3):
            future = getattr(asynchronous, method).submit(future)
        assert torch.equal(future.result(timeout=60), rows)


def test_collectives_work_on_one_inline_rank_and_are_refused_with_advice_on_several(
    here: px.ResourcePool,
) -> None:
    with pytest.raises(px.RemoteCallError, match="ray backend"):
        px.WorkerGroup(here, Plain).join_collective()
    group = px.WorkerGroup(here[0:1], Actor)
    try:
        assert group.sum_of_ranks() == [0.0]
    finally:
        group.run(lambda worker: dist.destroy_process_group())


def test_bound_methods_keep_the_signature_of_the_method_and_env_reaches_every_rank(plain: Any) -> None:
    assert str(plain.variable.__signature__) == "(name: 'str') -> 'str | None'"
    assert plain.method(Plain.variable)("RANK") == ["0", "1", "2"]
    assert "variable" in dir(plain)
    assert plain.variable("OF_THE_GROUP") == ["yes"] * 3
    assert plain.variable("OMP_NUM_THREADS") == ["3"] * 3
    assert os.environ.get("OF_THE_GROUP") is None
    with pytest.raises(AttributeError, match=r"no attribute 'remote': call it bare"):
        _ = plain.same.remote
    assert not hasattr(plain.same, "other")


@pytest.mark.parametrize("seconds", [None, float("inf"), 1e300])
def test_timeouts_may_be_none_infinite_or_huge(plain: Any, seconds: float | None) -> None:
    future = plain.variable.options(timeout=seconds, stall_report_after=seconds).submit("RANK")

    assert future.result(timeout=seconds) == ["0", "1", "2"]
    assert px.gather(plain.variable.submit("RANK"), timeout=seconds) == [["0", "1", "2"]]
    assert dict(plain.variable.submit("RANK").stream(timeout=seconds)) == {0: "0", 1: "1", 2: "2"}


def test_resource_counts_are_refused_with_the_address_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.session.session import _with_address

    assert _with_address({"num_gpus": 8})["address"] == "local"
    assert _with_address({"address": "auto"}) == {"address": "auto"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(px.DeclarationError, match="RAY_ADDRESS"):
        _with_address({"num_gpus": 8})
