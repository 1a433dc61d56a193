"""``px.attach``: find a detached group by its name, from any driver of the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.api.selection import Selection
from phalanx.api.view import GroupView
from phalanx.debug.trace import from_environment
from phalanx.errors import PlacementError, RankReport, WorkerDiedError
from phalanx.group.group import Group
from phalanx.group.roster import DetachedRecord, detached_key
from phalanx.members import processes
from phalanx.session.session import session


class AttachedGroup(GroupView):
    """Handle of a detached group in a driver that did not start it. Calls go to the same processes."""

    def __init__(self, core: Group, reservations: Mapping[str, Sequence[str]]) -> None:
        super().__init__(Selection(core))
        self._reservations = reservations

    @property
    def state(self) -> str:
        """ "ready", "broken" or "closed", as far as this driver knows."""
        return self.core.lifecycle.state.value

    def close(self, *, pool: bool = False) -> None:
        """End the group: each worker's own ``close()``, then the processes. Idempotent.

        Args:
            pool: True to release the slots of its detached pool too.
        """
        if self.core.begin_close():
            processes.close(self.core)
        for keys in self._reservations.values() if pool else ():
            self.core.backend.release(keys)


def attach(name: str) -> AttachedGroup:
    """Return the detached group ``name``. If any of its ranks died, the group is broken and can only be closed.

    Args:
        name: name given to ``px.WorkerGroup(..., name=..., detached=True)``.

    Raises:
        PlacementError: if the cluster has no such group.
        DeclarationError: if another version of the library started the group.
    """
    backend = session.get_backend()
    published = backend.published(detached_key(name))
    record = None if published is None else DetachedRecord.from_bytes(name, published)
    if record is None or not record.members:
        raise PlacementError(
            f"px.attach({name!r}): there is no detached group of that name on this cluster; make it with "
            f"px.WorkerGroup(pool, Cls, name={name!r}, detached=True) on a pool with detached=True"
        )
    endpoints = [replace(one, handle=backend.find(str(one.name))) for one in record.members]
    from_environment()
    core = Group(record.handle, backend, len(endpoints), owner=False)
    core.detached_record = published
    core.extras = dict(zip((one.slot for one in endpoints), record.extras, strict=False))
    session.add_group(core)
    missing = [rank for rank, endpoint in enumerate(endpoints) if endpoint.handle is None]
    if missing:
        reports = tuple(RankReport(rank, "died") for rank in missing)
        core.epoch.stay = [one if one.handle is not None else None for one in endpoints]  # close() ends them
        core.broken(WorkerDiedError(f"ranks {missing} have ended", group=name, failures=reports))
    else:
        core.enter(endpoints)
        core.started()
    return AttachedGroup(core, record.reservations)
