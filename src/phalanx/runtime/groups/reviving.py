"""A broken group is mended when it is next called."""

from __future__ import annotations

import logging
from collections.abc import Callable

from phalanx.errors import WorkerDiedError
from phalanx.runtime.groups.core import GroupCore
from phalanx.runtime.life.lifecycle import State
from phalanx.runtime.life.policy import Replace, Restart
from phalanx.runtime.life.watchman import look_once

__all__ = ["Reviver"]

_log = logging.getLogger("phalanx")


class Reviver:
    """Mends a broken group when it is next called, by ``mend``, as often as its policy allows."""

    def __init__(self, core: GroupCore, policy: Restart | Replace, mend: Callable[[], None]) -> None:
        self._core = core
        self._policy = policy
        self._mend_it = mend
        self._restarts: list[float] = []
        self._preemptions = 0

    def __call__(self) -> None:
        core = self._core
        with core.restarting:
            if core.lifecycle.state is not State.BROKEN:
                return  # another thread was here first
            if self._was_preempted():
                self._mend_preempted()
                return
            now = core.transport.now()
            self._restarts = self._policy.recent(self._restarts, now)
            if not self._policy.allows(self._restarts, now):
                what = "restart" if isinstance(self._policy, Restart) else "replacement"
                core.lifecycle.remark = (
                    f"{self._policy} does not allow another {what} now: {len(self._restarts)} were made."
                )
                return
            self._restarts.append(now)
            self._mend(f"after: {str(core.lifecycle.cause).partition(chr(10))[0]}")

    def _mend_preempted(self) -> None:
        policy = self._policy
        if isinstance(policy, Replace) and not policy.allows_preemption(self._preemptions):
            self._core.lifecycle.remark = (
                f"{policy} does not allow another preemption: {self._preemptions} were mended."
            )
            return
        self._preemptions += 1
        self._mend("since its ranks lost their nodes as was announced")

    def _mend(self, why: str) -> None:
        how = (
            "gets new processes for the ranks that it lost,"
            if isinstance(self._policy, Replace)
            else "is restarted"
        )
        _log.warning("group %r %s %s", self._core.name, how, why)
        self._mend_it()

    def _was_preempted(self) -> bool:
        """Whether the group broke because nodes were taken away of which that was known before: no failure of it."""
        core = self._core
        cause, nodes = core.lifecycle.cause, core.epoch.nodes
        ranks = cause.cause_ranks if isinstance(cause, WorkerDiedError) else ()
        if not ranks or max(ranks) >= len(nodes):
            return False
        look_once(core.life)
        return core.life.notices.explains([nodes[rank] for rank in ranks])
