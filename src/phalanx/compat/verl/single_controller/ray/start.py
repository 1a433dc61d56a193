"""Start of a group's ranks: the library's own launch, with the names on which verl's code relies."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.compat.verl.single_controller.base.decorator import CheckFailed
from phalanx.compat.verl.single_controller.base.worker_group import UnusableValue
from phalanx.compat.verl.single_controller.ray.classes import (
    RayClassWithInitArgs,
    _unwrap_ray_remote,
    merge_runtime_env,
)
from phalanx.compat.verl.single_controller.ray.pools import RayResourcePool, get_master_addr_port, native_pool
from phalanx.declare.bind import HONOURED_RAY_OPTIONS
from phalanx.declare.bind import BoundClass as NativeClass

if TYPE_CHECKING:
    from phalanx.compat.verl.single_controller.ray import native

_log = logging.getLogger(__name__)
_WITHOUT_EFFECT = ("enable_task_events", "num_returns", "_metadata", "num_gpus", "concurrency_groups")
_BEFORE_START = ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH")
#: Variables that the controller itself sets for ranks; a group's ``worker_env`` may set any other variable.
_PROTECTED = (
    "WORLD_SIZE",
    "RANK",
    "WG_PREFIX",
    "WG_BACKEND",
    "RAY_LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ASYNC_CONCURRENCY = 1000  # Ray's default for an actor with async methods


def start(group: Any, strategy: str) -> native.StartedRanks:
    """Start one actor per slot, in the order of the pool's bundles, and wait for their constructors.

    Args:
        group: the ``RayWorkerGroup``, with its options as attributes.
        strategy: Ray's placement strategy of the slots of a node.

    Raises:
        PlacementError: if there is no room for the actors.
        WorkerInitError: if a constructor raised; also an instance of the raised type.
    """
    # This module loads the runtime, which only processes that start groups need.
    from phalanx.compat.verl.single_controller.ray import native

    group.resource_pool.get_placement_groups(strategy=strategy, device_name=group.device_name)
    pool = native_pool(group.resource_pool, group.device_name, group.use_gpu)
    given = group.ray_cls_with_init
    user_class = _unwrap_ray_remote(given.cls)
    name = f"{group.name_prefix}{user_class.__name__}"
    actors = tuple(f"{name}_{slot.block}:{slot.bundle}" for slot in pool.slots)
    bound = NativeClass(user_class, *given.args, **given.kwargs)
    master = _master(group, pool)
    return native.start(
        name,
        pool,
        bound,
        _options(group, user_class),
        actors=actors,
        methods=callables(user_class),
        amend=lambda setup: _amended(setup, group, master),
    )


def callables(cls: type) -> list[str]:
    """Return the names of a worker class's methods that handles may call."""
    return [
        name
        for name in dir(cls)
        if not (name.startswith("__") and name.endswith("__")) and callable(getattr(cls, name, None))
    ]


def _has_async(cls: type) -> bool:
    classes = [cls, *getattr(cls, "raw_cls_dict", {}).values()]
    return any(
        inspect.iscoroutinefunction(getattr(one, name, None)) for one in classes for name in callables(one)
    )


def _options(group: Any, cls: type) -> native.GroupOptions:
    from phalanx.compat.verl.single_controller.ray import native

    given = group.ray_cls_with_init.ray_options()
    concurrency, effective = None, HONOURED_RAY_OPTIONS
    if _has_async(cls):
        concurrency = given.get("max_concurrency") or _ASYNC_CONCURRENCY
    else:
        effective -= {"max_concurrency"}  # Ray would run calls on threads
    for name in sorted(set(given) - {*effective, *_WITHOUT_EFFECT}):
        if not name.startswith("_"):
            _log.warning("Ray option %s=%r of %s has no effect in a group", name, given[name], cls.__name__)
    early = {name: value for name, value in group.customized_worker_env.items() if name in _BEFORE_START}
    runtime_env = merge_runtime_env(given.get("runtime_env"), {"env_vars": early} if early else None)
    nsight = group.worker_nsight_options
    if group.profile_steps and group.device_name == "cuda" and nsight is not None:
        end = f"repeat-shutdown:{6 * len(group.profile_steps)}"  # as in verl
        runtime_env["nsight"] = {**nsight, "capture-range-end": nsight.get("capture-range-end") or end}
    return native.GroupOptions(
        env={name: str(value) for name, value in group.customized_worker_env.items()},
        runtime_env=runtime_env or None,
        num_cpus=given.get("num_cpus"),
        memory=given.get("memory"),
        resources=given.get("resources") or {},
        start_timeout=float(group._ray_wait_register_center_timeout),
        max_concurrency=concurrency,
        show_ranks=native.shown_ranks(),
    )


def _master(group: Any, pool: native.ResourcePool) -> tuple[str, str] | None:
    """Return address and port of the user's rendezvous; None keeps the library's, whose port rank 0 holds."""
    address, port, port_range = group._master_addr, group._master_port, group._ray_master_port_range
    if not (address or port or port_range):
        return None
    slot = pool.slots[0]
    where = PlacementGroupSchedulingStrategy(
        pool.holdings[slot.pool].reservation.ids[slot.block], placement_group_bundle_index=slot.bundle
    )
    found = ray.get(get_master_addr_port.options(scheduling_strategy=where).remote(port_range))
    return str(address or found[0]), str(port or found[1])


def _amended(setup: native.RankConfig, group: Any, master: tuple[str, str] | None) -> native.RankConfig:
    """Return a rank's config with the variables of verl's workers, besides torch's own."""
    local = {
        "LOCAL_WORLD_SIZE": "1",  # each process sees its own device only
        "LOCAL_RANK": "0",
    }
    environment = {
        **setup.environment,
        **{name: str(group.customized_worker_env.get(name, ours)) for name, ours in local.items()},
        "WG_PREFIX": group.name_prefix,
        "WG_BACKEND": "ray",
        "RAY_LOCAL_WORLD_SIZE": str(setup.local_world_size),
    }
    if master is not None:
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = master
    return replace(setup, environment=environment, local_device=0)


def check_request(pool: Any, cls: Any, worker_env: Mapping[str, str], use_gpu: bool | None) -> None:
    """Check the arguments of a new group.

    Raises:
        CheckFailed: if ``pool`` or ``cls`` has another type.
        UnusableValue: if ``worker_env`` sets a variable that the controller sets, or ``use_gpu`` asks for accelerators
            that the pool's slots do not have.
    """
    if not isinstance(pool, RayResourcePool):
        raise CheckFailed(
            f"RayWorkerGroup(resource_pool={pool!r}): expected a RayResourcePool, such as RayResourcePool([4])"
        )
    if not isinstance(cls, RayClassWithInitArgs):
        raise CheckFailed(
            f"RayWorkerGroup(ray_cls_with_init={cls!r}): expected RayClassWithInitArgs(cls=ray.remote(MyWorker), ...)"
        )
    taken = [name for name in _PROTECTED if name in worker_env]
    if taken:
        raise UnusableValue(
            f"Cannot override protected system env: {{{', '.join(map(repr, taken))}}}: these differ by rank or group "
            "and are set by the controller; take them out of worker_env"
        )
    if use_gpu and not pool.use_gpu:
        raise UnusableValue(
            f"use_gpu is True but resource_pool.use_gpu is False: make the pool {pool.name_prefix!r} with "
            "use_gpu=True, or the group without"
        )
