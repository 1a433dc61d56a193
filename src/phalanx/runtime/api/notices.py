"""``px.notices``: which ranks will lose their node."""

from __future__ import annotations

from phalanx.runtime.api.views import GroupView
from phalanx.runtime.life.preemption import Notice
from phalanx.runtime.life.watchman import look_once


def notices(group: GroupView) -> list[Notice]:
    """The notices that ranks of a group will lose their node, each given once; does not wait.

    They come from nodes that the cluster drains (before a preemption, by an autoscaler, by ``ray drain-node``), at most
    two seconds after that became known. What becomes of such ranks counts as no failure: ``px.Restart`` brings the
    group back on other nodes without counting it.

    Example::

        for notice in px.notices(group):
            px.save(group, folder)
            print(notice.ranks, notice.node, notice.deadline, notice.reason)
    """
    life = group.core.life
    if life.transport.immediate or not life.owner:  # nobody watches for it
        look_once(life)
    return life.notices.take()
