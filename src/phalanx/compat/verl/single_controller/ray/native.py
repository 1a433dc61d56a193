"""All that the drop-in uses of the library's own runtime: slots, the start of ranks, and what the commands are told.

No other module of the drop-in imports from ``phalanx.runtime``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.util.placement_group import PlacementGroup

from phalanx.compat.verl.remote import make_host
from phalanx.declare.bind import ClassWithInitArgs
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.groups.launch import Launched, Processes, launch
from phalanx.runtime.groups.starts import constructors, sent_to
from phalanx.runtime.life.epoch import GroupCard
from phalanx.runtime.life.notices import group_entry, publisher
from phalanx.runtime.life.options import GroupOptions
from phalanx.runtime.pools.pool import Holding, ResourcePool
from phalanx.runtime.session import connection
from phalanx.topology.slots import Slot, SlotView
from phalanx.transport.base import Facade, Transport
from phalanx.transport.ray.cluster import Connection
from phalanx.transport.ray.placement import RayReservation
from phalanx.wire.messages import RankSetup

__all__ = [
    "Connection",
    "GroupOptions",
    "Names",
    "RankSetup",
    "ResourcePool",
    "Started",
    "pool_on",
    "start",
    "transport",
]

_numbers = itertools.count(-1, -1)  # the library's own groups count upwards


def transport() -> Transport:
    """The Ray cluster that this process uses; one is started or joined where there is none."""
    return connection.transport("ray")


def pool_on(
    name: str,
    groups: Sequence[PlacementGroup],
    places: Sequence[tuple[int, int]],
    *,
    resource: str | None,
    max_colocate_count: int,
    detached: bool,
) -> ResourcePool:
    """A pool over slots that are reserved already, which owns nothing.

    Args:
        places: by rank: index of the placement group, and of the bundle in it.
        resource: what an accelerator is called, or None for ranks without.
    """
    holding = Holding(
        pool=name,
        transport=transport(),
        reservation=RayReservation(name, list(groups)),
        bundle={key: float(value) for key, value in groups[0].bundle_specs[0].items()},
        resource=resource,
        max_colocate_count=max_colocate_count,
        accelerators_per_slot=1 if resource else 0,
        detached=detached,
        reservation_name=name,
    )
    view = SlotView(tuple(Slot(index, bundle, name) for index, bundle in places))
    return ResourcePool.of(name, view, {name: holding})


@dataclass(frozen=True)
class Names:
    """What the processes of a group are called: the group, each of them by slot, and the methods of their handles."""

    group: str
    actors: tuple[str, ...]
    methods: tuple[str, ...]
    namespace: str


@dataclass(frozen=True)
class Started:
    """Ranks whose constructors have returned.

    ``environment`` is what rank 0 was told; ``release`` gives back what they hold beside their slots.
    """

    handles: list[Any]
    environment: Mapping[str, str]
    release: Callable[[], None]


def start(
    pool: ResourcePool,
    bound: ClassWithInitArgs,
    names: Names,
    options: GroupOptions,
    amend: Callable[[RankSetup], RankSetup],
) -> Started:
    """Start one actor per slot and wait for their constructors. ``amend`` has the last word on what each is told.

    Ranks end with this process at the latest, unless they are to be detached.

    Raises:
        PlacementError: no room for them.
        WorkerInitError: a constructor raised; also an instance of what it raised.
    """
    class_name = bound.cls.__name__
    card = GroupCard(class_name, 0, methods={"": {}}, callables={"": frozenset()}, classes={"": class_name})
    core = GroupCore(
        card, pool.transport, pool.world_size, owner=True
    )  # for as long as they are being started
    methods = tuple(Facade(name, "", name) for name in names.methods)
    processes = Processes(class_name, methods, names.actors, names.namespace, make_host)
    launched = launch(
        pool, {"": bound}, names.group, 0, options, core.outlet, processes=processes, amend=amend
    )
    if not options.detached:
        pool.transport.attend(launched.endpoints)
    _settle(launched, core, options.start_timeout)
    unpublish = _published(core, names)

    def release() -> None:
        unpublish()
        _release_extras(launched, pool.transport)

    handles = [endpoint.handle for endpoint in launched.endpoints]
    return Started(handles, launched.setups[0].environment, release)


def _settle(launched: Launched, core: GroupCore, timeout: float) -> None:
    call = constructors(core, timeout)
    sent_to(call, core.life.enter(launched.endpoints), launched.tickets)
    try:
        call.result(None)
    except BaseException:
        core.transport.kill(launched.endpoints)
        _release_extras(launched, core.transport)
        raise


def _published(core: GroupCore, names: Names) -> Callable[[], None]:
    """Let the commands see the group; what to call when it is gone."""
    entry = replace(
        group_entry(core.life),
        number=next(_numbers),
        name=names.group,
        state="ready",
        methods={"": list(names.methods)},
        detached=False,  # px.attach does not find it
    )
    return publisher.add(core.transport, entry)


def _release_extras(launched: Launched, transport: Transport) -> None:
    if launched.extras is not None:
        transport.release(launched.extras)
