"""What a driver has ranks do for its saves and loads; see `phalanx.worker.handlers`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.checkpoint.storage.write_plan import Offer
from phalanx.checkpoint.worker.checkpoint_requests import (
    Loaded,
    LoadOrder,
    RankFiles,
    Restore,
    Take,
    Taken,
    WriteFiles,
    WriteModel,
)
from phalanx.wire.outputs import BackendRef

if TYPE_CHECKING:  # a driver needs the names of these functions, and nothing of what they run on
    from phalanx.checkpoint.worker.rank_checkpoint import RankSaving
    from phalanx.worker.worker_runtime import WorkerRuntime

#: How long a copy may be on its way to the rank that fetches it, in seconds.
FETCH_S = 300.0


def _of(host: WorkerRuntime) -> RankSaving:
    from phalanx.checkpoint.worker.rank_checkpoint import RankSaving  # torch: where something is saved

    found = host.context.shared.get("saving")
    if not isinstance(found, RankSaving):
        found = RankSaving(host.context, host.instances, host.device)
        host.context.shared["saving"] = found
        host.closers.add(found.end)
    return found


def has_state(host: WorkerRuntime) -> bool:
    """Whether any of this rank's roles has a state."""
    return _of(host).has_state()


def offer(host: WorkerRuntime, role: str, alone: bool) -> dict[str, Offer]:
    """What this rank has to save, by role."""
    saving = _of(host)
    return {one: saving.offer(one, alone=alone) for one in saving.roles(role)}


def write(host: WorkerRuntime, order: WriteFiles) -> RankFiles:
    """Write what this rank is to write."""
    return _of(host).write(order)


def stage(host: WorkerRuntime, order: WriteFiles) -> int:
    """Copy what this rank is to write; a thread writes it."""
    return _of(host).stage(order)


def told(host: WorkerRuntime, notes: str) -> RankFiles | str | None:
    """What came of the save whose thread tells it in ``notes``; None where it has not ended."""
    return _of(host).told(notes)


def rest(host: WorkerRuntime, notes: str) -> None:
    """Have the thread that tells its end in ``notes`` stop, and wait until it writes no more."""
    _of(host).rest(notes)


def write_model(host: WorkerRuntime, order: WriteModel) -> int:
    """Write boxes of a model into safetensors files that are there already."""
    return _of(host).write_model(order)


def plan_load(host: WorkerRuntime, order: LoadOrder) -> dict[str, list[str]]:
    """See whether what was saved fits; keys that this rank does not take, by role."""
    return _of(host).plan_load(order)


def load(host: WorkerRuntime, order: LoadOrder) -> Loaded:
    """Read what was planned, and take it over."""
    return _of(host).load(order)


def take(host: WorkerRuntime, order: Take) -> Taken:
    """Copy the state of this rank's roles into its memory, and offer its holder what that lacks."""
    saving = _of(host)
    copy = saving.copies.take(
        order.number, order.last, {role: saving.leaves(role) for role in saving.roles("")}
    )
    sent = saving.copies.changed(order.number, order.last, copy, again=order.again)
    return Taken(host.put(sent), copy.nbytes, sent.nbytes)


async def hold(host: WorkerRuntime, copies: Mapping[int, BackendRef], number: int, last: int) -> None:
    """Keep copies of other ranks' states."""
    for rank, ref in copies.items():
        _of(host).copies.hold(rank, number, last, await _fetched(host, ref))


async def _fetched(host: WorkerRuntime, ref: BackendRef) -> Any:
    """What another rank offers; the calls of an asynchronous rank go on meanwhile."""
    if host.in_driver or host.place is None or not host.place.asynchronous:
        return host.fetch(ref, FETCH_S)
    return await asyncio.to_thread(host.fetch, ref, FETCH_S)


def give(host: WorkerRuntime, rank: int, number: int) -> BackendRef:
    """The copy that is kept for another rank."""
    return host.put(_of(host).copies.held(rank, number))


def show(host: WorkerRuntime) -> BackendRef:
    """The state of this rank as it is."""
    from phalanx.checkpoint.worker.snapshot import state_now  # torch: where something is copied

    saving = _of(host)
    return host.put(state_now({role: saving.leaves(role) for role in saving.roles("")}))


async def restore(host: WorkerRuntime, order: Restore) -> int:
    """Go back to a snapshot; the bytes of it."""
    from phalanx.checkpoint.worker.snapshot import (  # torch: where something is restored
        drop_gradients,
        restore_role,
    )

    saving = _of(host)
    if order.copy is not None:
        saving.copies.put_back(order.number, await _fetched(host, order.copy))
    copy = saving.copies.own(order.number)
    for role, one in copy.roles.items():
        restore_role(saving.parts(role), one, role)
    for instance in host.instances.values():
        drop_gradients(instance)
    if not order.keep_rng:
        saving.copies.draw_on(copy)  # last: loading may draw
    return copy.nbytes
