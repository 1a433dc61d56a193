"""Nodes that Ray drains. Private to Ray (2.60): where it has no such call, no node is said to go."""

from __future__ import annotations

import logging

import ray
from ray._private import state

from phalanx.transport.values import GoingNode

_log = logging.getLogger("phalanx")
_told: list[str] = []


def going_nodes() -> list[GoingNode]:
    """The nodes that are drained: before a preemption, by an autoscaler, or by ``ray drain-node``."""
    if not ray.is_initialized():
        return []
    try:
        found = state.state.get_draining_nodes()
        return [
            GoingNode(str(node), deadline / 1000.0 if deadline else None, "Ray drains its node")
            for node, deadline in found.items()
        ]
    except (AttributeError, TypeError, ValueError) as error:
        if not _told:
            _told.append(str(error))
            _log.warning(
                "this version of Ray (%s) does not tell which nodes it drains (%s): there are no notices of "
                "preemptions",
                ray.__version__,
                error,
            )
        return []
