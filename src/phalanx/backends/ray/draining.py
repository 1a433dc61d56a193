"""Nodes that Ray drains, or that a signal ended. Uses private parts of Ray (2.60); without them no node is reported.

A signal on a node (a spot machine that is shut down, a pod that is deleted, ``ray stop``) ends its raylet and all
ranks there at once: they cannot be moved in time. But the raylet reports the reason, so the loss can be told from a
crash. A signal to a rank alone is a failure of that rank, because Ray itself sends signals to workers.
"""

from __future__ import annotations

import logging

import ray

from phalanx.backends.backend_types import DrainingNode
from phalanx.backends.ray import private

_log = logging.getLogger("phalanx")
_told: list[str] = []


def draining_nodes(ended: bool = False) -> list[DrainingNode]:
    """Return the nodes that are drained: before a preemption, by an autoscaler, or by ``ray drain-node``.

    With ``ended``, return also the nodes that were lost because a signal or an autoscaler ended them.
    """
    if not private.is_connected():
        return []
    found = _draining()
    if ended:
        found += [
            DrainingNode(node["NodeID"], None, f"its node was told to end: {node.get('DeathReasonMessage')}")
            for node in private.nodes()
            if not node["Alive"] and node.get("DeathReason") in private.TOLD_TO_END
        ]
    return found


def _draining() -> list[DrainingNode]:
    try:
        found = private.draining_nodes()
        return [
            DrainingNode(str(node), deadline / 1000.0 if deadline else None, "Ray drains its node")
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
