"""Which of the rows that waited to be trained on are there again after a restart. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from phalanx.channels.ready import Ready
from phalanx.channels.staleness_state import StalenessState

NOT_SAVED = "not saved"
"""The reason under which rows are dropped that were accepted and lie in no channel that was saved."""


def only_there(state: StalenessState, there: Iterable[tuple[int, int, int]]) -> StalenessState:
    """``state`` without the accepted rows that lie nowhere; these count as dropped, so their credit is back.

    Args:
        there: (lease, start, stop) of rows that are in a saved channel, counted as the lease accepted them.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    for lease, start, stop in sorted(there):
        places.setdefault(lease, []).append((start, stop))
    kept = tuple(part for ready in state.ready for part in _met(ready, places.get(ready.lease, [])))
    gone = sum(ready.rows for ready in state.ready) - sum(ready.rows for ready in kept)
    if not gone:
        return state
    dropped = {**state.dropped, NOT_SAVED: state.dropped.get(NOT_SAVED, 0) + gone}
    return replace(state, ready=kept, dropped=dropped)


def _met(ready: Ready, places: list[tuple[int, int]]) -> list[Ready]:
    both = [(max(ready.start, start), min(ready.stop, stop)) for start, stop in places]
    return [replace(ready, start=start, stop=stop) for start, stop in both if start < stop]
