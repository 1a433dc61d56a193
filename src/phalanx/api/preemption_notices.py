"""``px.preemption_notices``: which ranks will lose their node."""

from __future__ import annotations

from phalanx.api.view import GroupView
from phalanx.group.notices import PreemptionNotice
from phalanx.group.preemption_monitor import look_once


def preemption_notices(group: GroupView) -> list[PreemptionNotice]:
    """The notices that ranks of a group will lose their node, each given once; does not wait.

    They come from nodes that the cluster drains (before a preemption, by an autoscaler, by ``ray drain-node``), at most
    two seconds after that became known. What becomes of such ranks counts as no failure: ``px.RestartPolicy``
    brings the group back on other nodes without counting it.

    Example::

        for notice in px.preemption_notices(group):
            px.save(group, folder)
            print(notice.ranks, notice.node, notice.deadline, notice.reason)
    """
    core = group.core
    if core.backend.immediate or not core.owner:  # nobody watches for it
        look_once(core)
    return core.notices.take()
