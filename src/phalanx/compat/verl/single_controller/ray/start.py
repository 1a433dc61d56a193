"""Starting the ranks of a drop-in group: the library's own launch, under the names that verl's code relies on."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx.compat.verl import overlay
from phalanx.compat.verl.errors import CheckFailed, NoAccelerators, SystemVariables
from phalanx.compat.verl.single_controller.ray.classes import (
    RayClassWithInitArgs,
    _unwrap_ray_remote,
    merge_runtime_env,
)
from phalanx.compat.verl.single_controller.ray.pools import (
    RayResourcePool,
    get_master_addr_port,
    native_pool,
)
from phalanx.declare.bind import ClassWithInitArgs as NativeClass

if TYPE_CHECKING:
    from phalanx.compat.verl.single_controller.ray import native

_log = logging.getLogger(__name__)
_HONOURED = ("num_cpus", "memory", "resources", "runtime_env", "max_concurrency")
_WITHOUT_EFFECT = ("enable_task_events", "num_returns", "_metadata", "num_gpus", "concurrency_groups")
_BEFORE_START = ("PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PATH")
#: What the controller itself tells every rank; a group's ``worker_env`` may set any other variable.
_PROTECTED = (
    "WORLD_SIZE",
    "RANK",
    "WG_PREFIX",
    "WG_BACKEND",
    "RAY_LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_ASYNC_CONCURRENCY = 1000  # what Ray gives an actor with async methods


@dataclass(frozen=True)
class Order:
    """What a group asks for when its ranks are started."""

    pool: RayResourcePool
    cls: RayClassWithInitArgs
    prefix: str
    detached: bool
    device_name: str
    use_gpu: bool
    worker_env: Mapping[str, str]
    nsight: Any
    strategy: str
    timeout: float
    master: tuple[str | None, str | None]
    port_range: list[int] | None


@dataclass
class Started:
    """Ranks whose constructors have returned."""

    handles: list[Any]
    names: list[str]
    master: tuple[str, str]
    release: Callable[[], None]
    calls: native.Calls | None


def start(order: Order) -> Started:
    """Start one actor per slot, in the order of the pool's bundles, and wait for their constructors.

    Raises:
        PlacementError: no room for them.
        WorkerInitError: a constructor raised; also an instance of what it raised.
    """
    # The runtime, which only those load who start groups.
    from phalanx.compat.verl.single_controller.ray import native

    order.pool.get_placement_groups(strategy=order.strategy, device_name=order.device_name)
    pool = native_pool(order.pool, order.device_name, order.use_gpu)
    user_class = _unwrap_ray_remote(order.cls.cls)
    names = native.Names(
        group=f"{order.prefix}{user_class.__name__}",
        actors=tuple(
            f"{order.prefix}{user_class.__name__}_{slot.block}:{slot.bundle}" for slot in pool.slots
        ),
        methods=tuple(callables(user_class)),
        namespace=ray.get_runtime_context().namespace,
    )
    bound = NativeClass(user_class, *order.cls.args, **order.cls.kwargs)
    master = _master(order, pool)
    options = _options(order, user_class)
    ranks = native.start(pool, bound, names, options, lambda setup: _amended(setup, order, master))
    return Started(
        handles=ranks.handles,
        names=list(names.actors),
        master=(ranks.environment["MASTER_ADDR"], ranks.environment["MASTER_PORT"]),
        release=ranks.release,
        calls=ranks.calls,
    )


def callables(cls: type) -> list[str]:
    """Names of the methods by which a handle may call a worker of this class."""
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


def _options(order: Order, cls: type) -> native.GroupOptions:
    from phalanx.compat.verl.single_controller.ray import native

    given = order.cls.ray_options()
    for name in sorted(set(given) - {*_HONOURED, *_WITHOUT_EFFECT}):
        if not name.startswith("_"):
            _log.warning("Ray option %s=%r of %s has no effect in a group", name, given[name], cls.__name__)
    early = {name: value for name, value in order.worker_env.items() if name in _BEFORE_START}
    runtime_env = merge_runtime_env(given.get("runtime_env"), {"env_vars": early} if early else None)
    if order.nsight is not None:
        runtime_env["nsight"] = order.nsight
    concurrency = given.get("max_concurrency") or None
    if _has_async(cls) and (concurrency is None or concurrency == 1):
        concurrency = _ASYNC_CONCURRENCY
    return native.GroupOptions(
        env={name: str(value) for name, value in order.worker_env.items()},
        runtime_env=runtime_env or None,
        num_cpus=given.get("num_cpus"),
        memory=given.get("memory"),
        resources=given.get("resources") or {},
        start_timeout=order.timeout,
        max_concurrency=concurrency,
        detached=order.detached,
        show_ranks="merged" if overlay.active() and not native.shown_by_choice() else None,  # as verl does
    )


def _master(order: Order, pool: native.ResourcePool) -> tuple[str, str] | None:
    """Where the user wants the ranks to meet; None leaves it to the library, whose rank 0 holds the port already."""
    address, port = order.master
    if order.port_range is None and address is None and port is None:
        return None
    slot = pool.slots[0]
    where = PlacementGroupSchedulingStrategy(
        pool.holdings[slot.pool].reservation.ids[slot.block], placement_group_bundle_index=slot.bundle
    )
    found = ray.get(get_master_addr_port.options(scheduling_strategy=where).remote(order.port_range))
    return str(address or found[0]), str(port or found[1])


def _amended(setup: native.RankSetup, order: Order, master: tuple[str, str] | None) -> native.RankSetup:
    """The variables that verl's workers find beside torch's own."""
    local = {
        "RAY_LOCAL_RANK": str(setup.local_rank),
        "LOCAL_WORLD_SIZE": "1",  # each process sees its own device only
        "LOCAL_RANK": "0",
    }
    environment = {
        **setup.environment,
        **{name: str(order.worker_env.get(name, ours)) for name, ours in local.items()},
        "WG_PREFIX": order.prefix,
        "WG_BACKEND": "ray",
        "RAY_LOCAL_WORLD_SIZE": str(setup.local_world_size),
    }
    if master is not None:
        environment["MASTER_ADDR"], environment["MASTER_PORT"] = master
    return replace(setup, environment=environment, local_device=0)


def own(group: Any, release: Callable[[], None]) -> None:
    """Give back what was reserved beside the slots once the group is gone."""
    weakref.finalize(group, release)


def handle_of(name: str) -> Any:
    """The actor of that name in this driver's namespace. Raises ValueError where there is none."""
    return ray.get_actor(name)


def check_use_gpu(pool: RayResourcePool, use_gpu: bool) -> None:
    """Refuse ranks with accelerators on slots without. Raises NoAccelerators."""
    if use_gpu and not pool.use_gpu:
        raise NoAccelerators(
            f"use_gpu is True but resource_pool.use_gpu is False: make the pool {pool.name_prefix!r} with "
            "use_gpu=True, or the group without"
        )


def check_order(pool: Any, cls: Any, worker_env: Mapping[str, str]) -> None:
    """What a new group needs, and the variables that are to be set in its ranks.

    Raises:
        CheckFailed: ``pool`` or ``cls`` is something else.
        SystemVariables: ``worker_env`` sets what the controller sets.
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
        raise SystemVariables(
            f"Cannot override protected system env: {{{', '.join(map(repr, taken))}}}: these differ by rank or group "
            "and are set by the controller; take them out of worker_env"
        )
