"""The library's own runtime for this package: slots, the start of ranks, tracked calls, and registry records.

No other module of this package imports from the packages of the driver.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from phalanx.backends.backend_types import Backend, Facade, Reservation, ResultHandle, SpawnRequest
from phalanx.calls.call import Call
from phalanx.calls.call_state import Results
from phalanx.calls.health_check import checks
from phalanx.calls.send import new_call, planning_began
from phalanx.compat.verl import overlay
from phalanx.compat.verl.installation import make_runtime
from phalanx.config import Settings, Shown, own_variables, settings
from phalanx.debug.trace import from_environment, keep_saved
from phalanx.declare.bind import BoundClass
from phalanx.dispatch.plan import CallPlan, GatherPlan
from phalanx.group.epoch import GroupHandle
from phalanx.group.group import Group
from phalanx.group.options import GroupOptions
from phalanx.members.launch import Launched, launch
from phalanx.members.processes import construct, constructors
from phalanx.members.recovery import ensure_ready
from phalanx.pools.pool import ResourcePool, SlotReservation
from phalanx.session.session import session
from phalanx.topology.slots import Slot, SlotView
from phalanx.wire.messages import RankConfig

_numbers = itertools.count(-1, -1)  # the library's own groups count upwards


def backend() -> Backend:
    """Return this process's connection to Ray. Starts or joins a cluster if there is none."""
    return session.get_backend("ray")


def shown_ranks() -> Shown:
    """Return the ranks to show: if neither ``PHALANX_SHOW_RANKS`` nor ``px.init(show_ranks=)`` is set, as verl does."""
    chosen = "PHALANX_SHOW_RANKS" in own_variables() or session.show_ranks != Settings.show_ranks
    return session.show_ranks if chosen or not overlay.active() else "merged"


def pool_on(
    name: str,
    groups: Sequence[PlacementGroup],
    places: Sequence[tuple[int, int]],
    *,
    resource: str | None,
    max_colocate_count: int,
) -> ResourcePool:
    """Return a pool over reserved slots. It does not own them.

    Args:
        places: by rank, the indices of the placement group and of the bundle in it.
        resource: Ray's name of an accelerator, or None for ranks without accelerators.
    """
    holding = SlotReservation(
        pool=name,
        backend=backend(),
        reservation=Reservation(None, list(groups), [group.id.hex() for group in groups]),
        blocks=tuple(group.bundle_count for group in groups),
        bundle={key: float(value) for key, value in groups[0].bundle_specs[0].items()},
        resource=resource,
        max_colocate_count=max_colocate_count,
        accelerators_per_slot=1 if resource else 0,
        detached=False,
    )
    view = SlotView(tuple(Slot(index, bundle, name) for index, bundle in places))
    return ResourcePool.of(name, view, {name: holding})


@dataclass
class StartedRanks:
    """Ranks whose constructors have returned, and calls on their handles, tracked like the library's own calls.

    Each call has one error for all ranks, a deadline (``PHALANX_CALL_TIMEOUT``), and a place in traces and counts. A
    call that a rank cannot finish breaks the group, and so does a rank that dies between calls.

    Attributes:
        handles, names: handles and names of their actors.
        master: address and port for the ranks' rendezvous.
    """

    handles: list[Any]
    names: list[str]
    master: tuple[str, str]
    _core: Group
    _with_deadline: deque[Call] = field(default_factory=deque)

    def begin(self, method: str, ranks: int, stored: int) -> Call:
        """Begin a call of the first ``ranks`` ranks, with ``stored`` bytes in the object store.

        Raises:
            GroupBroken, GroupClosed: if the group takes no calls.
        """
        core = self._core
        ensure_ready(core)
        began = planning_began()
        plan = CallPlan(range(ranks), (), {}, GatherPlan("list", range(ranks)))
        call = new_call(core, core.check(), plan, "", method, began=began)
        call.listener.planned(call)
        if stored:
            call.listener.stored(call, stored)
        return call

    def sent(self, call: Call, refs: Sequence[Any]) -> None:
        """Record Ray's references to a call's outputs, by rank."""
        core = self._core
        call.arrivals = Results(core.backend, [ResultHandle(ref) for ref in refs])
        call.note_sent(0)
        core.recent[call.number] = call
        while self._with_deadline and self._with_deadline[0].all_ended():
            self._with_deadline.popleft()
        if call.deadline is not None:  # which is checked even if no caller waits for the call
            self._with_deadline.append(call)


def start(
    name: str,
    pool: ResourcePool,
    bound: BoundClass,
    options: GroupOptions,
    *,
    actors: Sequence[str],
    methods: Sequence[str],
    amend: Callable[[RankConfig], RankConfig],
) -> StartedRanks:
    """Start one actor per slot and wait for their constructors. Ranks end with this process at the latest.

    Args:
        name, pool, bound, options: the group.
        actors: names of the actors, by slot.
        methods: names of the methods of their handles.
        amend: function that returns each rank's final config.

    Raises:
        PlacementError: if there is no room for the actors.
        WorkerInitError: if a constructor raised; also an instance of the raised type.
    """
    from_environment()  # first: a trace that cannot be written fails before any actor is started
    class_name = bound.cls.__name__
    handle = GroupHandle(
        class_name,
        0,
        methods={"": {}},
        callables={"": frozenset()},
        classes={"": class_name},
        call_timeout=settings().call_timeout,
        pool=pool.name,
    )
    core = Group(handle, pool.backend_api, pool.world_size, owner=True)
    core.roles, core.options = {"": bound}, options
    core.lifecycle.remedies = "Create it again by RayWorkerGroup(...)."
    session.add_group(core)
    facades = tuple(Facade(method, "", method) for method in methods)
    namespace = ray.get_runtime_context().namespace
    runtime = functools.partial(make_runtime, overlay.active())

    def amend_request(request: SpawnRequest) -> SpawnRequest:
        return replace(request, methods=facades, names=tuple(actors), namespace=namespace, factory=runtime)

    launched = launch(core, pool, 0, name=name, amend_request=amend_request, amend=amend)
    _await_constructors(launched, core)
    unpublish = _published(core, name, methods)
    extras, backend = core.extras, pool.backend_api  # not the core, which keeps the ranks alive

    def release() -> None:
        unpublish()
        backend.release(list(extras.values()))

    handles = [endpoint.handle for endpoint in launched.endpoints]
    environment = launched.configs[0].environment
    master = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    started = StartedRanks(handles, list(actors), master, core)
    weakref.finalize(started, release)
    return started


def _await_constructors(launched: Launched, core: Group) -> None:
    """Wait for the constructors, and monitor the ranks between calls."""
    try:
        with constructors(core) as call:
            construct(call, core.enter(launched.endpoints), launched.results)
    except BaseException:
        core.backend.kill(launched.endpoints)
        core.backend.release(list(core.extras.values()))
        raise
    core.started()
    checks.begin()
    # An actor with verl's trainer is killed when its work is done, so its trace is written periodically.
    if ray.get_runtime_context().get_actor_id() is not None:
        keep_saved()


def _published(core: Group, name: str, methods: Sequence[str]) -> Callable[[], None]:
    """Publish the record of the group for the commands. Return the function that withdraws the record."""
    entry = replace(core.record(), number=next(_numbers), name=name, methods={"": list(methods)})
    return session.publisher.add(core.backend, entry)
