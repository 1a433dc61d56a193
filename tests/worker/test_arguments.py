"""A future gives a rank what the result would: for all ways to join it, sizes of outputs, settings and splits."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.collect.join import gather
from phalanx.declare.dispatch_modes import Dispatch
from phalanx.dispatch.modes import plan
from phalanx.dispatch.plan import GatherPlan
from phalanx.dispatch.split import count_rows, split_rows
from phalanx.errors import DispatchError
from phalanx.wire.messages import PartInfo, ResultOf
from phalanx.worker.call_values import Arguments, described
from tests.dispatch.support import meshed, outputs_of, spec_of

ATOMS = st.sampled_from([None, 0, 1, 0.5, float("nan"), "a", b"b"])


def carried(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def piece_by_future(plan: GatherPlan, outputs: Sequence[Any], index: int, count: int, **more: Any) -> Any:
    """Piece ``index`` as a rank gets it that fetches what it needs of the outputs."""
    told = [carried(described(outputs[place])) for place in plan.take]
    refs = [each for parts in told for each in parts]
    infos, parts = range(0, len(refs), 2), range(1, len(refs), 2)
    token = ResultOf(tuple(parts), plan, (index, count, more.get("pad"), more.get("expected")), tuple(infos))
    return Arguments(refs, list).restore(token)


def alike(plan: GatherPlan, outputs: Sequence[Any], count: int, **more: Any) -> None:
    """By value and by future: the same pieces, or both refused."""
    try:
        wanted = split_rows(gather(plan, outputs), count)
    except DispatchError:
        for index in range(count):
            with pytest.raises(DispatchError):
                piece_by_future(plan, outputs, index, count, **more)
    else:
        for index, piece in enumerate(wanted):
            assert repr(piece_by_future(plan, outputs, index, count, **more)) == repr(piece)


def batch(rows: Any, setting: Any = 0.7) -> dict[str, Any]:
    return {"x": torch.as_tensor(rows), "ids": [int(row) for row in rows], "meta": {"setting": setting}}


SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@given(SIZES, st.integers(1, 5), ATOMS)
def test_the_pieces_of_joined_rows_keep_rows_and_settings(sizes: list[int], count: int, setting: Any) -> None:
    outputs = [batch(range(size), setting) for size in sizes]
    alike(GatherPlan("join", range(len(sizes))), outputs, count)


@given(st.lists(st.tuples(st.integers(0, 3), ATOMS), min_size=1, max_size=4), st.integers(1, 3))
def test_settings_that_differ_are_refused_from_every_piece(
    outputs: list[tuple[int, Any]], count: int
) -> None:
    alike(
        GatherPlan("join", range(len(outputs))), [batch(range(n), setting) for n, setting in outputs], count
    )


@given(SIZES, st.integers(1, 4), st.integers(2, 4))
def test_padding_of_the_source_is_in_no_piece(sizes: list[int], count: int, pad: int) -> None:
    spec = spec_of(Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=pad)
    call = plan(spec, meshed(dp=len(sizes)), (batch(range(sum(sizes))),), {})
    alike(call.gather, outputs_of(call, lambda x: x), count)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_balanced_rows_of_the_source_are_in_the_callers_order(
    lengths: list[int], dp: int, count: int, times: int
) -> None:
    spec = spec_of(Dispatch.mesh(balance="lengths"))
    call = plan(spec, meshed(dp=dp, tp=2), (batch(range(len(lengths))),), {"lengths": lengths})
    outputs = outputs_of(call, lambda x, lengths: batch([row for row in x["ids"] for _ in range(times)]))
    alike(call.gather, outputs, count)


def test_the_rows_of_the_other_arguments_are_expected_of_a_future() -> None:
    plan = GatherPlan("join", range(2))
    with pytest.raises(DispatchError, match="a future brought 4 rows, the other arguments have 5"):
        piece_by_future(plan, [[1, 2], [3, 4]], 0, 2, expected=5)


def test_outputs_without_rows_say_so() -> None:
    with pytest.raises(DispatchError, match="output 1 of its call has no rows"):
        Arguments([PartInfo(2, 8), PartInfo(None, 8)], list).restore(
            ResultOf((0, 1), GatherPlan("join", range(2)), (0, 2, None, None), (0, 1))
        )


@given(st.integers(0, 7), st.integers(1, 4))
def test_the_value_of_one_rank_is_split_on_the_ranks(rows: int, count: int) -> None:
    value = batch(range(rows))
    for index, piece in enumerate(split_rows(value, count)):
        token = ResultOf((0,), GatherPlan("first", (0,)), (index, count, None, count_rows(value)))
        assert repr(Arguments([value], list).restore(token)) == repr(piece)
