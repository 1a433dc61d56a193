"""Several roles in one process per rank: colocated, fused, or derived from a raw fused class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from phalanx.compat.verl.single_controller.base import Worker
from phalanx.compat.verl.single_controller.base.decorator import Dispatch, register
from phalanx.compat.verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
)
from phalanx.compat.verl.single_controller.ray.base import FusedWorkerCLSName, create_colocated_worker_raw_cls


@ray.remote
class Actor(Worker):
    def __init__(self, x: int = 0) -> None:
        super().__init__()
        self.x = x

    @register(Dispatch.ONE_TO_ALL)
    def add(self, y: int) -> int:
        return self.x + y + self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def add_soon(self, y: int) -> int:
        return self.x + y

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def generate(self, x: int) -> int:
        return x + 1

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


@ray.remote
class Critic(Worker):
    def __init__(self, config: dict[str, int]) -> None:
        super().__init__()
        self.config = config

    @register(Dispatch.ONE_TO_ALL)
    def sub(self, y: int) -> int:
        return self.config["b"] - y

    @register(Dispatch.DP_COMPUTE)
    async def sub_soon(self, y: int) -> int:
        return self.config["b"] - y

    @register(Dispatch.ONE_TO_ALL)
    def peers(self) -> dict[str, str]:
        return {name: type(peer).__name__ for name, peer in self.fused_worker_dict.items()}

    @register(Dispatch.ONE_TO_ALL)
    def ask_actor(self, y: int) -> int:
        return self.get_fused_worker_by_name("actor_rollout").add(y)

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        return os.getpid()


def roles() -> dict[str, RayClassWithInitArgs]:
    return {
        "actor_rollout": RayClassWithInitArgs(Actor, x=1),
        "critic": RayClassWithInitArgs(Critic, config={"b": 10}),
    }


def started(cls: RayClassWithInitArgs, prefix: str) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), cls, name_prefix=prefix)
    yield group
    for worker in group.workers:
        ray.kill(worker)


@pytest.fixture(scope="module")
def colocated(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    yield from started(create_colocated_worker_cls(roles()), "colocated")


@pytest.fixture(scope="module")
def fused(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    yield from started(create_colocated_worker_cls_fused(roles()), "fused")


@pytest.fixture(scope="module")
def hybrid(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    class Hybrid(create_colocated_worker_raw_cls(roles())):
        @register(Dispatch.ONE_TO_ALL)
        def both(self, y: int) -> int:
            return self.critic.sub(self.actor_rollout.add(y))

    cls = RayClassWithInitArgs(cls=ray.remote(Hybrid))
    cls.fused_worker_used = True
    yield from started(cls, "hybrid")


def test_actor_names_contain_the_name_of_the_generated_class(
    colocated: RayWorkerGroup, fused: RayWorkerGroup
) -> None:
    assert colocated.worker_names[0] == "colocatedWorkerDict_0:0"
    assert fused.worker_names[0] == f"fused{FusedWorkerCLSName}_actor_rollout_critic_0:0"


@pytest.mark.parametrize("kind", ["colocated", "fused"])
def test_spawned_roles_are_groups_that_share_processes(request: pytest.FixtureRequest, kind: str) -> None:
    spawned = request.getfixturevalue(kind).spawn({"actor_rollout", "critic"})
    actor, critic = spawned["actor_rollout"], spawned["critic"]

    assert (actor.add(1), critic.sub(3)) == ([2, 3], [7, 7])
    assert (critic.sub_soon([1, 2]), actor.add_soon(2)) == ([9, 8], [3, 3])
    assert actor.execute_all_sync("add", [1, 2]) == [2, 4]
    assert actor.process() == critic.process()


def test_a_role_has_only_its_own_methods_and_an_unknown_role_is_refused(fused: RayWorkerGroup) -> None:
    with pytest.raises(AttributeError):
        fused.spawn({"critic"})["critic"].add  # noqa: B018
    with pytest.raises(AssertionError, match="its roles"):
        fused.spawn({"reward"})


def test_the_group_and_its_handles_have_methods_prefixed_by_role(colocated: RayWorkerGroup) -> None:
    assert colocated.actor_rollout_add(1) == [2, 3]
    assert ray.get(colocated.workers[0].critic_sub.remote(1)) == 9
    assert ray.get(colocated.workers[0].generate.remote(1)) == 2  # a direct method has no prefix


def test_fused_roles_can_list_and_call_each_other(fused: RayWorkerGroup) -> None:
    critic = fused.spawn({"critic"})["critic"]

    assert critic.peers() == [{"actor_rollout": "Actor", "critic": "Critic"}] * 2
    assert critic.ask_actor(5) == [6, 7]


def test_fuse_makes_roles_attributes_of_the_group_also_in_a_task(hybrid: RayWorkerGroup) -> None:
    def call(group: RayWorkerGroup) -> Any:
        return group.actor_rollout.add(1), group.critic.sub(1), group.both(1)

    hybrid.fuse({"actor_rollout", "critic"})

    assert call(hybrid) == ([2, 3], [9, 9], [8, 7])
    assert ray.get(ray.remote(num_cpus=0)(call).remote(hybrid)) == call(hybrid)


def test_colocation_refuses_a_class_that_is_not_a_worker() -> None:
    with pytest.raises(AssertionError, match="derive from Worker"):
        create_colocated_worker_cls({"dict": RayClassWithInitArgs(dict)})
