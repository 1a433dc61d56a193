"""A group that is broken, or whose nodes go, is mended when it is next called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.errors import WorkerDiedError
from phalanx.group.group import Group
from phalanx.group.lifecycle import State
from phalanx.group.policy import ReplacePolicy, RestartPolicy
from phalanx.group.preemption_monitor import look_once

__all__ = ["AutoRecovery", "Moved"]

_AGAIN_AFTER_S = 1.0
_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class Moved:
    """What came of moving ranks off nodes that go: ``why`` they stay, and whether to try ``again`` at a later call."""

    done: bool
    why: str = ""
    again: bool = False


class AutoRecovery:
    """Mends a broken group when it is next called, by ``mend``, as often as its policy allows.

    ``move`` gives ranks new processes on other nodes while theirs are still there.
    """

    def __init__(
        self,
        core: Group,
        policy: RestartPolicy | ReplacePolicy,
        mend: Callable[[], None],
        move: Callable[[Sequence[int]], Moved] | None = None,
    ) -> None:
        self._core = core
        self._policy = policy
        self._mend_it = mend
        self._move = move
        self._move_after = 0.0
        self._stay: Moved | None = None  # what was said last
        self._restarts: list[float] = []
        self._preemptions = 0

    def __call__(self) -> None:
        core = self._core
        with core.restarting:
            if core.unmended:
                return
            with core.as_it_is():  # what moves and mends it makes calls itself
                if core.life.notices.urgent:
                    self._move_away()
                while core.lifecycle.state is State.BROKEN and self._mended():
                    pass  # it may have lost another rank by then

    def _mended(self) -> bool:
        """Mend it; False where the policy does not allow that once more."""
        core = self._core
        if self._was_preempted():
            return self._mended_as_preempted()
        now = core.transport.now()
        self._restarts = self._policy.recent(self._restarts, now)
        if not self._policy.allows(self._restarts, now):
            what = "restart" if isinstance(self._policy, RestartPolicy) else "replacement"
            core.lifecycle.remark = (
                f"{self._policy} does not allow another {what} now: {len(self._restarts)} were made."
            )
            return False
        self._restarts.append(now)
        self._mend(f"after: {str(core.lifecycle.cause).partition(chr(10))[0]}")
        return True

    def _move_away(self) -> None:
        """Give ranks whose nodes go new processes elsewhere, if the policy wants that."""
        core, policy = self._core, self._policy
        if core.transport.now() < self._move_after:
            return
        core.life.notices.urgent = False
        ranks = core.life.notices.ranks_to_move(core.epoch.nodes[: core.epoch.size])
        if self._move is None or not isinstance(policy, ReplacePolicy) or not ranks:
            return
        if core.lifecycle.state is not State.READY:
            return  # whoever mends it starts none on such nodes
        if not policy.allows_preemption(self._preemptions):
            _log.warning(
                "group %r: ranks %s stay on nodes that go: %s allows no more preemptions",
                core.name,
                list(ranks),
                policy,
            )
            return
        moved = self._move(ranks)
        if moved.done:
            self._preemptions += 1
            _log.warning("group %r: ranks %s were moved off nodes that go", core.name, list(ranks))
        elif moved != self._stay:
            _log.warning("group %r: ranks %s stay on nodes that go: %s", core.name, list(ranks), moved.why)
        self._stay = moved
        if moved.again:
            self._move_after = core.transport.now() + _AGAIN_AFTER_S
            core.life.notices.urgent = True

    def _mended_as_preempted(self) -> bool:
        policy = self._policy
        if isinstance(policy, ReplacePolicy) and not policy.allows_preemption(self._preemptions):
            self._core.lifecycle.remark = (
                f"{policy} does not allow another preemption: {self._preemptions} were mended."
            )
            return False
        self._preemptions += 1
        self._mend("since its ranks lost their nodes as was announced")
        return True

    def _mend(self, why: str) -> None:
        how = (
            "gets new processes for the ranks that it lost,"
            if isinstance(self._policy, ReplacePolicy)
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
