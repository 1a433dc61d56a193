"""Rows that waited to be trained on are there again only where their items were saved."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from phalanx.channels.ready import Ready
from phalanx.channels.restored import NOT_SAVED, only_there
from phalanx.channels.staleness_state import StalenessState, StalenessStateMachine

EMPTY = StalenessStateMachine(4, 8).state()

spans = st.lists(st.integers(0, 20), min_size=2, max_size=6, unique=True).map(sorted)


def state_of(leases: dict[int, list[int]]) -> StalenessState:
    """Each lease has accepted rows of version 0 between every other pair of bounds."""
    ready = tuple(
        Ready(lease, start, stop, 0)
        for lease, bounds in leases.items()
        for start, stop in zip(bounds[::2], bounds[1::2], strict=False)
    )
    return replace(EMPTY, ready=ready, submitted=sum(one.rows for one in ready))


def rows_of(ready: tuple[Ready, ...]) -> list[tuple[int, int]]:
    return [(one.lease, row) for one in ready for row in range(one.start, one.stop)]


@given(st.dictionaries(st.integers(0, 3), spans), st.dictionaries(st.integers(0, 3), spans))
def test_rows_stay_if_they_are_there_and_else_count_as_dropped(
    accepted: dict[int, list[int]], saved: dict[int, list[int]]
) -> None:
    state, there = state_of(accepted), state_of(saved)

    kept = only_there(state, [(one.lease, one.start, one.stop) for one in there.ready])

    places = set(rows_of(there.ready))
    assert rows_of(kept.ready) == [row for row in rows_of(state.ready) if row in places]
    assert kept.dropped.get(NOT_SAVED, 0) == len(rows_of(state.ready)) - len(rows_of(kept.ready))
    machine = StalenessStateMachine.load(kept)
    assert machine.rows.submitted == machine.rows.accepted + machine.rows.dropped + machine.rows.running
