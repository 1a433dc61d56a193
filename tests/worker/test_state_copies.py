"""A holder has the state of each complete snapshot, from the changes that a rank sends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import CheckpointError
from phalanx.wire.codec import decode, encode
from phalanx.worker.rank_state import RankState
from phalanx.worker.state_copies import StateCopies


def leaves(values: list[int]) -> dict[str, RankState]:
    tensors = {f"t{index}": torch.full((3,), float(value)) for index, value in enumerate(values)}
    return {"": RankState(torch.nn.ParameterDict(tensors), None, "cpu")}


def held(holder: StateCopies, number: int) -> list[int]:
    return [int(tensor[0]) for tensor in holder.held(0, number).data.values()]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=3, max_size=3), st.booleans()), max_size=12))
def test_a_holder_has_each_complete_snapshot_also_after_snapshots_that_did_not_reach_it(
    steps: list[tuple[list[int], bool]],
) -> None:
    rank, holder = StateCopies(), StateCopies()
    last, complete = 0, list[int]()
    for values, reaches in steps:
        _, sent = rank.take(last + 1, last, leaves(values), again=last > 0)
        holder.take(last + 1, last, leaves([0]), again=last > 0)
        if reaches:
            holder.hold(0, last + 1, last, decode(encode(sent)))
            last, complete = last + 1, values
        assert not last or held(holder, last) == complete


def test_a_holder_forgets_a_copy_that_is_not_renewed() -> None:
    rank, holder = StateCopies(), StateCopies()
    _, sent = rank.take(1, 0, leaves([5]), again=False)
    holder.hold(0, 1, 0, sent)
    holder.take(2, 1, leaves([0]), again=False)
    assert held(holder, 1) == [5]  # the second snapshot may still fail

    holder.take(3, 2, leaves([0]), again=False)
    with pytest.raises(CheckpointError):
        held(holder, 1)
