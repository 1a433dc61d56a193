"""Ranks that stay after a failed change of members: they end their calls, or are stopped."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.backends.backend_types import Endpoint
from phalanx.calls.call import Call
from phalanx.calls.run_on import run_on
from phalanx.group.group import Group
from phalanx.worker import handlers as questions

_ANSWER_S = 1.0
_INTERRUPTED_S = 1.0


def settle(core: Group, staying: Sequence[Endpoint]) -> None:
    """Make the ``staying`` ranks of the present epoch ready for the next change.

    Their calls are interrupted, and their collectives are aborted, since a rank that waits in a collective for a rank
    that never joins would wait for ever. Ranks that do not react are stopped, and count as lost.
    """
    backend, endpoints = core.backend, core.endpoints
    if core.closed or backend.immediate or not backend.connected():
        return  # close() ends them all
    dead = backend.dead_of(endpoints)
    ranks = [rank for rank, one in enumerate(endpoints) if one in staying and rank not in dead]
    if not ranks:
        return
    asked = run_on(core, questions.meet, ranks=ranks, title="settle", checked=False)
    late = _late(asked, ranks, _ANSWER_S)
    for rank, sight in zip(late, backend.sights([endpoints[rank] for rank in late], False), strict=True):
        for call in sight.running:
            backend.cancel([endpoints[rank]], [call])
    late = _late(asked, ranks, _INTERRUPTED_S) if late else []
    if late:
        backend.sever([endpoints[rank] for rank in late])
        late = _late(asked, ranks, _INTERRUPTED_S)
    backend.kill([endpoints[rank] for rank in late])


def _late(asked: Call, ranks: Sequence[int], seconds: float) -> list[int]:
    """Return the ranks that have not responded after ``seconds``."""
    positions = range(len(ranks))
    return [ranks[position] for position in asked.arrivals.wait(positions, len(positions), seconds)[1]]
