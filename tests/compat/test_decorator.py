"""Dispatch modes, their functions and their registry, without a backend."""

from __future__ import annotations

import inspect
import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base import decorator as d
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, Execute, register
from phalanx.compat.verl.single_controller.base.worker import DistRankInfo
from phalanx.errors import DispatchError

TWO: Any = SimpleNamespace(world_size=2)  # a group


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def test_modes_have_verls_numbers_and_functions_and_pickle_as_singletons() -> None:
    names = ["RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO"]
    names += ["DP_COMPUTE_PROTO_WITH_FUNC", "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD"]

    assert [getattr(Dispatch, name).value for name in names] == list(range(8))
    assert [mode.name for mode in Execute] == ["ALL", "RANK_ZERO"]
    assert pickle.loads(pickle.dumps(Dispatch.DP_COMPUTE)) is Dispatch.DP_COMPUTE
    assert all({"dispatch_fn", "collect_fn"} == set(d.get_predefined_dispatch_fn(mode)) for mode in Dispatch)


def test_register_refuses_invalid_modes() -> None:
    for mode in (5, "ONE_TO_ALL", {"dispatch_fn": print}):
        with pytest.raises(AssertionError, match="dispatch_mode"):
            register(mode)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="execute_mode"):
        register(Dispatch.ONE_TO_ALL, execute_mode=Dispatch.ONE_TO_ALL)


def test_a_registered_method_keeps_its_name_docstring_async_kind_and_registration() -> None:
    @register(Dispatch.DP_COMPUTE, blocking=False)
    async def method(self: Any) -> None:
        "What it does."

    assert (method.__name__, method.__doc__) == ("method", "What it does.")
    assert inspect.iscoroutinefunction(method)
    assert getattr(method, d.MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.DP_COMPUTE,
        "execute_mode": Execute.ALL,
        "blocking": False,
    }


def test_dp_compute_needs_an_element_per_rank_and_nd_compute_collects_by_mask() -> None:
    assert d.dispatch_dp_compute(TWO, [1, 2], a=(3, 4)) == (([1, 2],), {"a": (3, 4)})
    with pytest.raises(AssertionError, match="world_size = 2"):
        d.dispatch_dp_compute(TWO, 5)
    assert d.collect_nd_compute([False, True], TWO, [1, 2]) == [2]


def test_splitting_a_data_proto_needs_verl() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install verl") as raised:
        d.dispatch_dp_compute_data_proto(TWO, [1, 2])

    assert isinstance(raised.value, DispatchError)


def test_megatron_dispatches_over_dp_and_collects_from_tp_zero_of_the_last_stage() -> None:
    places = itertools.product(range(2), repeat=3)
    ranks = [DistRankInfo(tp_rank=tp, dp_rank=dp, pp_rank=pp, cp_rank=0) for pp, dp, tp in places]
    group: Any = SimpleNamespace(
        world_size=8,
        dp_size=2,
        pp_size=2,
        get_megatron_rank_info=lambda rank: ranks[rank],
    )

    [dealt], _ = d.dispatch_megatron_compute(group, ["a", "b"])

    assert dealt == ["a", "a", "b", "b"] * 2
    assert d.collect_megatron_compute(group, list(range(8))) == [4, 6]
    with pytest.raises(AssertionError, match="dp_size = 2"):
        d.dispatch_megatron_compute(group, ["a"])


def test_a_worker_registers_its_place_in_a_mesh_once(environment: None) -> None:
    worker = Worker()
    worker._register_dispatch_collect_info("actor", dp_rank=3, is_collect=True)

    assert (worker._query_dispatch_info("actor"), worker.query_collect_info("actor")) == (3, True)
    with pytest.raises(ValueError, match="actor"):
        worker._register_dispatch_collect_info("actor", dp_rank=1, is_collect=True)


def test_a_worker_can_copy_the_mesh_places_of_another_worker(environment: None) -> None:
    actor, reference, other = Worker(), Worker(), Worker()
    actor._register_dispatch_collect_info("train", dp_rank=3, is_collect=False)

    reference.set_dispatch_collect("ref", **actor.get_dispatch_collect())
    actor._register_dispatch_collect_info("infer", dp_rank=1, is_collect=True)
    other.set_dispatch_collect("train", **actor.get_dispatch_collect())

    assert reference.get_dispatch_collect() == {
        "dispatch_dp_rank": {"ref": 3},
        "collect_dp_rank": {"ref": False},
    }
    assert other._query_dispatch_info("train") == 3


def test_a_worker_reads_its_environment_and_a_missing_variable_raises(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "7")

    worker = Worker()

    assert (worker.rank, worker.world_size) == (5, 7)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(KeyError, match="WORLD_SIZE"):
        Worker()


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_registered_method_of_a_script_can_be_pickled_by_value(kind: str) -> None:
    space: dict[str, Any] = {"__name__": "__main__", "register": register, "Dispatch": Dispatch}
    exec(f"class Model:\n    @register(Dispatch.ONE_TO_ALL)\n    {kind} work(self, x): return x", space)

    assert pickle.loads(cloudpickle.dumps(space["Model"].work))
