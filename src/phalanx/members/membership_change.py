"""Ranks that join a group, and ranks that leave it, while the others work on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.errors import CallTimeout, GroupClosed
from phalanx.group.epoch import Epoch
from phalanx.group.group import Group
from phalanx.group.membership_refresh import publish
from phalanx.group.roster import Change
from phalanx.members.processes import GroupProcesses
from phalanx.members.weight_resync import bring_to_joined, mend_sources
from phalanx.pools.pool import ResourcePool
from phalanx.pools.slot_reservation import Tenant
from phalanx.worker import handlers as questions

_LOOKS_EVERY_S = 0.05


class Members:
    """Changes the members of one group, of a class whose ranks work each by itself.

    Those that join are behind the ranks that calls go to until they have what they need; those that leave are there
    until they have finished.
    """

    def __init__(self, core: Group, processes: GroupProcesses, pool: ResourcePool, tenant: Tenant) -> None:
        self._core = core
        self._processes = processes
        self._pool = pool
        self._tenant = tenant

    def change(self, change: Change, timeout: float | None) -> None:
        """Let ranks join, or leave.

        Raises:
            GroupClosed, GroupBroken: the group takes no calls.
            PlacementError, WorkerInitError, CallTimeout: ranks could not be started; the group is as it was.
            CallTimeout: ranks that leave have not finished within ``timeout``; they take no calls, and leave with the
                next change.
        """
        if change.joining:
            mend_sources(self._core)
        with self._core.restarting:
            self._core.ensure_ready()
            self._core.check()
            self._finish(timeout)  # whoever had not finished the last time
            # Where a restart ended those, their slots are booked still.
            self._pool.unclaim(self._tenant, self._pool.slots[self._core.world_size :])
            if change.joining:
                self._grow(change.joining)
            if change.leaving:
                self._shrink(len(change.leaving))
                self._finish(timeout)

    def _grow(self, joining: Sequence[int]) -> None:
        core, old = self._core, self._core.epoch
        size = joining[-1] + 1
        ground = self._pool.first(size)
        slots = ground.slots[old.size :]
        ground.claim(self._tenant, slots)
        try:
            with self._processes.joining(ground, range(old.size, size)):
                bring_to_joined(core)
        except BaseException:
            ground.unclaim(self._tenant, slots)
            raise
        with core.order:
            epoch = core.life.change(core.endpoints, size)
            self._tell(epoch)

    def _shrink(self, count: int) -> None:
        core = self._core
        if core.transport.immediate:  # a stream begins there when it is read
            for stream in core.under_way.streams_on(range(core.world_size - count, core.world_size)):
                stream.run_to_end()
        with core.order:  # what was sent before is before the question, and nothing comes after it
            epoch = core.life.change(core.endpoints, core.world_size - count)
            tail = range(epoch.size, len(epoch.endpoints))
            self._leaving = run_on(core, questions.leave, ranks=tail, title="leave", checked=False)
            self._tell(epoch)

    _leaving: Call | None = None

    def _tell(self, epoch: Epoch) -> None:
        """Tell the ranks of the group how many they are, each after the calls that it has; and views elsewhere."""
        publish(self._core.life, self._core.roster_key)
        meshes = {name: self._core.mesh(name) for name in self._core.card.meshes}
        told = (epoch.number, epoch.size, meshes)
        call = run_on(
            self._core, questions.follow, *told, ranks=epoch.everyone, title="follow", checked=False
        )
        call.arrivals.disregard()

    def _finish(self, timeout: float | None) -> None:
        """Wait for the ranks that leave, and end their processes."""
        core, epoch = self._core, self._core.epoch
        tail = range(epoch.size, len(epoch.endpoints))
        if not tail:
            return
        limit = None if timeout is None else core.transport.now() + timeout
        late = self._late(epoch, limit)
        if late:
            raise CallTimeout(
                f"px.resize({core.name}, {epoch.size}): ranks {late} are still at calls after {timeout:g} s; they get "
                "no more, and leave with the next px.resize of the group, which may be the same",
                group=core.name,
                method="px.resize",
                timeout=timeout,
            )
        leavers = epoch.endpoints[epoch.size :]
        self._processes.dismiss(epoch, tail)
        for endpoint in leavers:
            endpoint.retired = True
        self._leaving = None
        if core.closed:
            raise GroupClosed(f"group {core.name!r} was closed while ranks left it", group=core.name)
        self._tell(core.life.change(epoch.endpoints[: epoch.size], epoch.size))
        self._pool.unclaim(self._tenant, [endpoint.slot for endpoint in leavers])

    def _late(self, epoch: Epoch, limit: float | None) -> list[int]:
        """The ranks that leave and have not finished, once that is known or the time is over."""
        core = self._core
        tail = range(epoch.size, len(epoch.endpoints))
        streams = core.under_way.streams_on(tail)
        while True:
            for stream in streams:
                stream.run_to_end()  # whoever reads it may be the one who waits here
            left = None if limit is None else max(0.0, limit - core.transport.now())
            late = self._at_calls(epoch, tail, _LOOKS_EVERY_S if streams else left)
            if not late or (limit is not None and core.transport.now() >= limit):
                return late
            time.sleep(_LOOKS_EVERY_S)

    def _at_calls(self, epoch: Epoch, tail: range, seconds: float | None) -> list[int]:
        """Those that have not answered within a while, or work on nevertheless."""
        core, asked = self._core, self._leaving
        if asked is not None:
            _, late = asked.arrivals.wait(range(len(tail)), len(tail), seconds)
            if late:
                return [tail[position] for position in late]
        if not core.card.asynchronous or core.transport.immediate:
            return []  # each of them has answered after all calls before
        sights = core.transport.sights(epoch.endpoints[epoch.size :], False)
        return [rank for rank, sight in zip(tail, sights, strict=True) if sight.running]
