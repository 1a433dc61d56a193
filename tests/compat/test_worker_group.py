"""RayWorkerGroup: names, calls by name, references, errors, attaching by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from urllib.error import ContentTooShortError

import pytest
import ray
import torch

from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    collect_all_to_all,
    register,
)
from phalanx.compat.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from phalanx.compat.verl.single_controller.ray.group import PayloadEncoder
from phalanx.errors import RemoteCallError, WorkerInitError


def two_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Repeat two elements for every rank. Extend the given lists in place, as the published example does."""
    for values in [*args, *kwargs.values()]:
        values.extend(values[i % 2] for i in range(worker_group.world_size - 2))
    return args, kwargs


@ray.remote
class Toy(Worker):
    def __init__(self, x: int) -> None:
        super().__init__()
        self.x = x

    def foo(self, y: Any) -> Any:
        return self.x + y

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def one_to_all(self, x: int, y: int) -> int:
        return self.x + y + x

    @register(Dispatch.ALL_TO_ALL, blocking=False)
    def all_to_all(self, x: int, y: int) -> int:
        return self.x + y + x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def rank_zero(self, x: int, y: int) -> int:
        return self.x + y + x

    @register(Dispatch.RANK_ZERO)
    def only_zero(self, x: int) -> tuple[int, int]:
        return self.rank, x

    @register(dispatch_mode={"dispatch_fn": two_to_all, "collect_fn": collect_all_to_all})
    def custom(self, x: int, y: int) -> int:
        return self.x + y + x

    @register()
    def default_mode(self, x: Any) -> Any:
        return x

    @register(Dispatch.DP_COMPUTE)
    def dealt(self, x: Any, y: Any = None) -> Any:
        return x, y

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def generate(self, x: int) -> int:
        return x

    @register(Dispatch.ONE_TO_ALL)
    async def slow_add(self, x: int) -> int:
        return self.x + x

    @register(Dispatch.ONE_TO_ALL)
    def fail_on_one(self) -> int:
        if self.rank == 1:
            # Unlike its class, it has a single argument: default pickling would lose it.
            raise ContentTooShortError("rank one does not want to", ())  # type: ignore[arg-type]
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def hand_out(self, x: Any) -> Any:
        return [ray.put(x)]


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([2], use_gpu=False)
    made = RayWorkerGroup(pool, RayClassWithInitArgs(cls=Toy, x=2), name_prefix="basics")
    yield made
    for worker in made.workers:
        ray.kill(worker)


def test_any_method_can_be_called_by_name_and_lists_of_world_size_are_dealt_to_ranks(
    group: RayWorkerGroup,
) -> None:
    assert group.execute_all_sync("foo", y=3) == [5, 5]
    assert group.execute_all_sync("foo", y=[1, 2]) == [3, 4]
    with pytest.raises(AttributeError, match="execute_all_sync"):
        group.foo  # noqa: B018


def test_async_calls_and_non_blocking_methods_return_a_ray_reference_per_rank(group: RayWorkerGroup) -> None:
    refs = group.execute_all_async("foo", y=4)

    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs) == [6, 6]
    assert ray.get(group.one_to_all(x=1, y=2)) == [5, 5]


def test_the_dispatch_mode_decides_how_lists_are_dealt(group: RayWorkerGroup) -> None:
    refs = group.one_to_all(x=1, y=2)

    assert ray.get(group.all_to_all(x=[1, 2], y=[5, 6])) == [8, 10]
    assert (group.default_mode([1, 2]), group.default_mode(7)) == ([1, 2], [7, 7])
    assert group.dealt([1, 2], y=[3, 4]) == [(1, 3), (2, 4)]
    assert group.dealt(refs, y=[3, 4]) == [(5, 3), (5, 4)]  # references are elements


def test_rank_zero_and_async_calls_return_values_and_direct_calls_are_refused(group: RayWorkerGroup) -> None:
    assert (group.rank_zero(x=1, y=2), group.only_zero(7), group.slow_add(1)) == (5, (0, 7), [3, 3])
    with pytest.raises(NotImplementedError, match="handle"):
        group.generate(1)


def test_an_error_of_a_worker_keeps_its_type_from_a_call_and_from_a_reference(group: RayWorkerGroup) -> None:
    with pytest.raises(ContentTooShortError, match="does not want to") as raised:
        group.fail_on_one()

    assert isinstance(raised.value, RemoteCallError)
    assert "rank 1 " in str(raised.value)
    refs = group.execute_all_async("fail_on_one")
    assert ray.get(refs[0]) == 0
    with pytest.raises(ContentTooShortError, match="does not want to"):
        ray.get(refs[1])
    with pytest.raises(AssertionError, match="infer is not registered"):
        group._query_collect_info("infer")
    assert group.execute_all_sync("foo", 1) == [3, 3]


def test_workers_can_return_references(group: RayWorkerGroup) -> None:
    [[first], _] = group.hand_out(torch.arange(3))

    assert ray.get(first).tolist() == [0, 1, 2]


def test_workers_have_names_and_environment_variables_by_rank(group: RayWorkerGroup) -> None:
    [first, second] = group.execute_all_sync("environment")

    assert group.worker_names == ["basicsToy_0:0", "basicsToy_0:1"]
    assert [rank["RANK"] for rank in (first, second)] == ["0", "1"]
    assert {first[key] for key in ("WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE")} == {"2"}
    assert (first["WG_PREFIX"], first["WG_BACKEND"]) == ("basics", "ray")
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (group.master_address, group.master_port)


def test_a_group_can_be_made_of_handles_and_passed_to_a_task(group: RayWorkerGroup) -> None:
    cls = RayClassWithInitArgs(cls=Toy, x=2)
    found = RayWorkerGroup(worker_handles=group.workers, ray_cls_with_init=cls)

    @ray.remote(num_cpus=0)
    def call(given: RayWorkerGroup) -> Any:
        return given.dealt([1, 2]), given.worker_names

    @ray.remote(num_cpus=0)
    def call_by_name(given: RayWorkerGroup) -> Any:
        return given.execute_all_sync("foo", [1, 2])

    without_class = RayWorkerGroup(worker_handles=group.workers)
    assert ray.get(call_by_name.remote(without_class)) == group.execute_all_sync("foo", [1, 2])
    assert found.custom(x=[1, 2], y=[5, 6]) == [8, 10]
    assert found.world_size == 2
    assert ray.get(call.remote(group)) == ([(1, None), (2, None)], group.worker_names)


def test_a_group_without_a_pool_and_workers_or_with_an_unknown_option_is_refused() -> None:
    toy = RayClassWithInitArgs(cls=Toy, x=2)
    with pytest.raises(AssertionError, match="worker_handles"):
        RayWorkerGroup(ray_cls_with_init=toy)
    with pytest.raises(TypeError, match="detached"):
        RayWorkerGroup(RayResourcePool([1]), toy, detached=True)  # type: ignore[call-arg]


def test_an_error_of_a_constructor_is_raised_when_the_group_is_created(ray_cluster: None) -> None:
    @ray.remote
    class Broken(Worker):
        def __init__(self) -> None:
            raise KeyError("weights")

    with pytest.raises(KeyError) as raised:
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(cls=Broken))

    assert isinstance(raised.value, WorkerInitError)


def test_large_arguments_count_for_each_rank_and_once_for_the_store() -> None:
    payloads, megabyte = PayloadEncoder(), 1 << 20
    large, small, plain = torch.zeros(megabyte, dtype=torch.uint8), torch.zeros(8), 3
    for value in (large, large, small, plain):
        payloads.of(value, shared=False)

    assert megabyte <= payloads.nbytes([large, plain]) < megabyte + 4096
    assert 32 <= payloads.nbytes([small]) < 4096
    assert megabyte <= payloads.stored < megabyte + 4096  # once, without the small values
