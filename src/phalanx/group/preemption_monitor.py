"""Watches for nodes that will be drained, and notifies groups that have ranks there."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from phalanx.backends.backend_types import Backend, DrainingNode
from phalanx.group.group import Group
from phalanx.group.preemption_notices import Seat
from phalanx.session.background import Background
from phalanx.session.session import session

LOOK_EVERY_S = 0.5
_log = logging.getLogger("phalanx")


def seats_of(group: Group) -> list[Seat]:
    """Where the ranks of a group are now."""
    return [Seat(one.facts.slot.node_id, one.facts.slot.host) for one in group.epoch.endpoints]


def look_once(group: Group) -> None:
    """Record the draining and the ended nodes for a group; queries the cluster, which takes some milliseconds."""
    if group.backend.connected():
        group.notices.see(group.backend.draining_nodes(ended=True), seats_of(group))


def turn() -> float | None:
    """Query each cluster once for all groups of this process, and call their ``on_notice``."""
    groups: list[Group] = [one for one in session.groups() if one.has_pool and not one.closed]
    backends = {id(group.backend): group.backend for group in groups}
    draining = {key: _draining(backend) for key, backend in backends.items()}
    for group in groups:
        group.notices.see(draining[id(group.backend)], seats_of(group))
        _call(group)
    return LOOK_EVERY_S if any(not backend.immediate for backend in backends.values()) else None


def watch() -> None:
    """Begin to look for draining nodes, until no group of this process is open."""
    _looks.begin()


def _draining(backend: Backend) -> Sequence[DrainingNode]:
    try:
        return backend.draining_nodes() if backend.connected() else ()
    except Exception:  # of the backend, while it shuts down: the next look tells more
        _log.debug("asking for draining nodes failed", exc_info=True)
        return ()


def _call(group: Group) -> None:
    for notice in group.notices.take_uncalled():
        _log.warning("%s", notice)
        if group.options.on_notice is not None:
            try:
                group.options.on_notice(notice)
            except Exception:
                _log.exception("on_notice of group %r raised, and the group goes on", group.name)


_looks = Background(turn)
