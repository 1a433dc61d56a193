"""A group on new processes: same slots, same handles, next epoch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from phalanx.errors import GroupBroken, GroupClosed, PhalanxError
from phalanx.runtime.life.lifecycle import State

if TYPE_CHECKING:
    from phalanx.runtime.api.group import WorkerGroup
    from phalanx.runtime.life.policy import Restart

_log = logging.getLogger("phalanx")


def restart(group: WorkerGroup) -> None:
    """End what is left of a group and start it anew; see ``WorkerGroup.restart``."""
    core = group.core
    with core.restarting:
        was_ready = core.lifecycle.state is State.READY
        core.begin_restart()
        epoch = core.epoch
        try:
            group._end_processes(patience=was_ready)
            group._start_epoch(epoch)
        except BaseException as error:
            _abandon(group)
            core.broken(_as_cause(group, error), epoch)
            raise
        if core.closed:
            _abandon(group)
            raise GroupClosed(f"group {core.name!r} was closed while it was restarted", group=core.name)


def _abandon(group: WorkerGroup) -> None:
    """End the processes that were started; all that they hold too, where ``close()`` was over before they came."""
    if group.core.closed:
        group._end_processes(patience=False)
    else:
        group.core.transport.kill(group.core.endpoints)


def _as_cause(group: WorkerGroup, error: BaseException) -> PhalanxError:
    if isinstance(error, PhalanxError):
        return error
    text = f"group {group.core.name!r} could not be restarted: {type(error).__name__}: {error}"
    return GroupBroken(text, group=group.core.name)


class Reviver:
    """Restarts a broken group when it is next called, as often as its policy allows."""

    def __init__(self, group: WorkerGroup, policy: Restart) -> None:
        self._group = group
        self._policy = policy
        self._restarts: list[float] = []

    def __call__(self) -> None:
        core = self._group.core
        with core.restarting:
            if core.lifecycle.state is not State.BROKEN:
                return  # another thread was here first
            now = core.now()
            self._restarts = self._policy.recent(self._restarts, now)
            if not self._policy.allows(self._restarts, now):
                core.lifecycle.remark = (
                    f"{self._policy} does not allow another restart now: {len(self._restarts)} were made."
                )
                return
            self._restarts.append(now)
            _log.warning(
                "group %r is restarted after: %s", core.name, str(core.lifecycle.cause).partition("\n")[0]
            )
            restart(self._group)
