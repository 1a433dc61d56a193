"""Library functions that a driver runs on ranks, with the runtime as first argument.

A function keeps its name and arguments from version to version: a driver may call ranks that an older driver started.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from phalanx.declare.context import context_of
from phalanx.declare.state_declarations import declared_states
from phalanx.declare.worker import REJOIN
from phalanx.topology.mesh import Mesh
from phalanx.wire.value import lazy
from phalanx.worker.rendezvous import collectives

if TYPE_CHECKING:  # a driver needs the names of these functions, and no torch or runtime
    from phalanx.worker import rank_state, state_copies
    from phalanx.worker.worker_runtime import WorkerRuntime
else:
    rank_state = lazy("phalanx.worker.rank_state")
    state_copies = lazy("phalanx.worker.state_copies")


def make_runtime(services: Any) -> WorkerRuntime:
    """Return the runtime of a new worker process, which is the first argument of the functions below."""
    from phalanx.worker.worker_runtime import WorkerRuntime  # heavy

    return WorkerRuntime(services)


def meshes(runtime: WorkerRuntime) -> dict[str, dict[str, int]]:
    """Return this rank's coordinates by axis in each mesh that its workers registered."""
    return runtime.context.places()


def call_log(runtime: WorkerRuntime) -> list[tuple[int, str]]:
    """Return number and name of the calls that ran here in debug mode, in their order."""
    return list(runtime.call_log)


def close(runtime: WorkerRuntime) -> Any:
    """Run the users' ``close()`` of each role, and the exit hooks, on the event loop of the rank if it has one."""
    return runtime.close()


def follow(
    runtime: WorkerRuntime, number: int, world_size: int, meshes: Mapping[str, Mesh] | None = None
) -> None:
    """Enter an epoch in which other ranks have joined or left, with the new size and meshes of the group."""
    for context in (runtime.context, *map(context_of, runtime.instances.values())):
        context.epoch, context.world_size, context.meshes = number, world_size, dict(meshes or {})
    os.environ["WORLD_SIZE"] = str(world_size)


def meet(runtime: WorkerRuntime) -> None:
    """Do nothing. The response shows that the rank is idle."""


def leave(runtime: WorkerRuntime) -> None:
    """Reject calls of views of the group, and hand items over to their channels at exit: this rank leaves the group."""
    runtime.closers.leaves = True
    for worker in runtime.instances.values():
        if hasattr(worker, "__phalanx_leaves__"):
            worker.__phalanx_leaves__()


#: Flags of DDP that the constructors of new ranks may have set: the ranks that stay must have the same.
_DDP_FLAGS = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
#: Key of the world that a rank left and, after a failed try, has not joined again.
_LEFT = "left world"


def rejoin(runtime: WorkerRuntime, epoch: int, environment: Mapping[str, str]) -> None:
    """Enter an epoch, together with the constructors of the new ranks.

    Set ``environment``, the variables by which the ranks meet in the epoch, and then call the ``rejoin()`` of each
    object in the order of their creation.

    Raises:
        BaseException: if a ``rejoin()`` raises it.
    """
    runtime.context.epoch = epoch
    shared, world = runtime.context.shared, None
    if not runtime.in_driver:  # in the driver a process group belongs to another group, of a single rank
        os.environ.update(environment)
        world = shared[_LEFT] = _leave_world() or shared.get(_LEFT)
    shared[REJOIN] = lambda worker: _join_world(worker, world)
    try:
        for instance in runtime.instances.values():
            own = getattr(instance, "rejoin", None)
            # Blocks the rank's event loop, if it has one: it is between two epochs.
            runtime.loop.run(own() if callable(own) else _join_world(instance, world))
        shared.pop(_LEFT, None)
    finally:
        del shared[REJOIN]


def _leave_world() -> tuple[str, timedelta | None] | None:
    """Destroy the process groups. Return backend and timeout of the default process group, None if it did not exist."""
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        return None
    if not dist.is_initialized():
        # A failed try has used up the first name of a group, under which new ranks meet.
        dist.distributed_c10d._world.group_count = 0
        return None
    options = getattr(dist.group.WORLD, "options", None)  # torch has no public way to ask
    world = dist.get_backend(), getattr(options, "_timeout", None)
    collectives.leave()
    dist.destroy_process_group()  # returns at once, even if a thread is in one of its collectives
    return world


def _join_world(worker: Any, world: tuple[str, timedelta | None] | None) -> None:
    """Create the default process group, once, and the worker's DDP wrappers again: `phalanx.Worker.rejoin`."""
    if world is None:
        return
    import torch.distributed as dist  # there was a process group
    from torch.nn.parallel import DistributedDataParallel

    backend, timeout = world
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)
    for name, ddp in list(vars(worker).items()):
        if isinstance(ddp, DistributedDataParallel):
            options: dict[str, Any] = {option: True for option in _DDP_FLAGS if getattr(ddp, option, False)}
            if not ddp.broadcast_buffers:
                options["broadcast_buffers"] = False
            if not ddp.bucket_bytes_cap_default:
                options["bucket_cap_mb"] = ddp.bucket_bytes_cap / 2**20
            # The wrapper broadcasts the values of rank 0, which may be a new rank.
            before = copy.deepcopy(ddp.module.state_dict())
            again = DistributedDataParallel(ddp.module, device_ids=ddp.device_ids or None, **options)
            again.module.load_state_dict(before)
            setattr(worker, name, again)


#: Key of the data of the last snapshot that the holder lacks, until it is sent.
_CHANGES = "snapshot changes"


def has_state(runtime: WorkerRuntime) -> bool:
    """Return whether any role of this rank has a state."""
    declared = declared_states(runtime.context)
    return any(rank_state.has_state(worker, declared.get(role)) for role, worker in runtime.instances.items())


def take_snapshot(runtime: WorkerRuntime, number: int, last: int, again: bool) -> tuple[int, int]:
    """Copy the state of this rank's roles as snapshot ``number``.

    Args:
        last: the previous complete snapshot; 0: none.
        again: if True, the holder has ``last``, so that only the changes since then are sent.

    Returns:
        The bytes of the copy, and of the data that its holder lacks.
    """
    copy, sent = _copies(runtime).take(number, last, _states(runtime), again=again)
    runtime.context.shared[_CHANGES] = sent
    return copy.nbytes, sent.nbytes


def changes(runtime: WorkerRuntime) -> state_copies.StateCopy:
    """Return the data of the last snapshot that the holder lacks."""
    return runtime.context.shared.pop(_CHANGES)


def hold_copies(
    runtime: WorkerRuntime, copies: Mapping[int, state_copies.StateCopy], number: int, last: int
) -> None:
    """Hold copies of other ranks' states."""
    for rank, held in copies.items():
        _copies(runtime).hold(rank, number, last, held)


def give_copy(runtime: WorkerRuntime, rank: int, number: int) -> state_copies.StateCopy:
    """Return the copy held for another rank."""
    return _copies(runtime).held(rank, number)


def copy_of_now(runtime: WorkerRuntime) -> state_copies.StateCopy:
    """Return a copy of the current state, without random generators."""
    return state_copies.copy_state(rank_state.states_of(runtime, rng=False))


def restore_snapshot(runtime: WorkerRuntime, held: state_copies.StateCopy | None, number: int) -> None:
    """Restore snapshot ``number``; random generators keep their state if the copy has none.

    ``held`` is a copy that another rank made or held; None: use the rank's own copy.
    """
    _copies(runtime).restore(number, held, _states(runtime), runtime.instances.values())
    for role, declared in declared_states(runtime.context).items():
        runtime.weights.loaded(role, declared.model)


def _states(runtime: WorkerRuntime) -> dict[str, rank_state.RankState]:
    """Return the state of each role, and last, since loading may draw random numbers, that of the generators."""
    generators = rank_state.RankState(rank_state.generators_of(runtime.device), None, runtime.device)
    return {**rank_state.states_of(runtime, rng=False), state_copies.RNG: generators}


def _copies(runtime: WorkerRuntime) -> state_copies.StateCopies:
    return runtime.context.shared.setdefault("snapshots", state_copies.StateCopies())
