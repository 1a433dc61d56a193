"""Results that are not here yet, as arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.declare.dispatch_modes import Dispatch, custom_mode
from phalanx.dispatch.modes import plan
from phalanx.errors import DispatchError
from tests.dispatch.support import FakeFuture, FakeTarget, by_rank, meshed, spec_of

TWO = FakeTarget(2)


def value_of(future: Any) -> Any:
    return future.value


def test_peers_of_a_dp_coordinate_share_the_piece_and_padding_travels_with_it() -> None:
    call = plan(spec_of(Dispatch.mesh()), meshed(dp=2, tp=2), (FakeFuture(None),), {})
    pieces = [args[0] for _, args, _ in by_rank(call)]
    assert pieces[0] is pieces[1]
    assert (pieces[2].index, pieces[2].count) == (1, 2)

    padded = spec_of(Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=4)
    call = plan(padded, TWO, (FakeFuture(None), torch.arange(5)), {})  # another argument has rows
    assert next(call.arguments())[0][0].pad_to_multiple == 4
    assert call.gather.trim == [(4, 3), (4, 2)]


def test_futures_in_a_dealt_list_go_whole_to_their_ranks_and_one_in_its_place_is_waited_for() -> None:
    one, two = FakeFuture(1), FakeFuture(2)
    call = plan(spec_of(Dispatch.DP_COMPUTE), TWO, ([one, two],), {})
    assert [args[0] for _, args, _ in by_rank(call)] == [one, two]

    whole = (FakeFuture([1, 2]),)
    call = plan(spec_of(Dispatch.ALL_TO_ALL), TWO, whole, {}, materialize=value_of)
    assert [args[0] for _, args, _ in by_rank(call)] == [1, 2]
    with pytest.raises(DispatchError, match=r"pass its \.result\(\) instead"):
        plan(spec_of(Dispatch.DP_COMPUTE), TWO, whole, {})


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(Dispatch.mesh(balance=lambda x: x)),
        spec_of(Dispatch.mesh(group_size=2)),
        spec_of(Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=2, pad_mask="mask"),
        spec_of(Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=2),
    ],
)
def test_plans_that_need_the_rows_wait_for_the_future(spec: Any) -> None:
    call = plan(spec, meshed(dp=2), (FakeFuture(torch.arange(6)),), {}, materialize=value_of)
    assert sum(call.rows or ()) == 6


def test_custom_functions_get_the_value() -> None:
    seen: list[Any] = []
    mode = custom_mode(lambda group, x: (seen.append(x), (([x, x],), {}))[1], lambda group, outputs: outputs)
    plan(spec_of(mode), TWO, (FakeFuture(torch.ones(1)),), {}, materialize=value_of)
    assert torch.equal(seen[0], torch.ones(1))
