"""Plans of calls: modes without a mesh, execute modes, padding, futures as arguments, ``collect=`` of each mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from phalanx.declare.dispatch_modes import Dispatch, Execute, collecting, custom_mode
from phalanx.dispatch.modes import dealt_or_same, plan
from phalanx.dispatch.plan import Same
from phalanx.dispatch.shardable import replicate
from tests.dispatch.support import FakeFuture, FakeTarget, by_rank, meshed, run, spec_of

TWO, FOUR = FakeTarget(2), FakeTarget(4)


def test_dp_compute_deals_list_elements_to_ranks_and_sends_replicated_values_whole() -> None:
    call = plan(
        spec_of(Dispatch.DP_COMPUTE),
        FOUR,
        ([1, 2, 3, replicate(4)], replicate([5, 6])),
        {"y": ("a", "b", "c", "d")},
    )
    assert call.args[1] == Same([5, 6])
    assert by_rank(call) == [(rank, (rank + 1, [5, 6]), {"y": "abcd"[rank]}) for rank in range(4)]


def test_changing_a_list_after_planning_does_not_change_the_call() -> None:
    given = [1, 2, 3, 4]
    call = plan(spec_of(Dispatch.DP_COMPUTE), FOUR, (given,), {})
    given[0] = 99
    assert next(call.arguments()) == ((1,), {})


def test_arguments_without_rows_reach_every_rank_unchanged() -> None:
    config = {"lr": 0.1, "betas": (0.9, 0.99)}
    call = plan(spec_of(Dispatch.DP_COMPUTE_PROTO), FOUR, (config,), {})
    assert call.rows is None
    assert call.args[0].value is config
    assert (
        run(spec_of(Dispatch.DP_COMPUTE_PROTO), FOUR, 3, method=lambda x: torch.tensor([x])).tolist()
        == [3] * 4
    )


@pytest.mark.parametrize(
    "kwargs", [{}, {"x": [1, 2, 3]}, {"x": (1, 2, 3, 4)}, {"x": [1, 2, 3, 4], "y": 5}], ids=repr
)
def test_execute_all_deals_elements_only_if_all_arguments_are_lists_of_world_size(
    kwargs: dict[str, Any],
) -> None:
    assert dealt_or_same(4, list(kwargs.values())) is Dispatch.ONE_TO_ALL
    assert dealt_or_same(4, [[1, 2, 3, 4], ["a", "b", "c", "d"]]) is Dispatch.ALL_TO_ALL


@pytest.mark.parametrize("name", sorted(Dispatch.names()))
def test_rank_zero_execution_passes_arguments_as_they_are(name: str) -> None:
    call = plan(spec_of(Dispatch[name], execute=Execute.RANK_ZERO), FOUR, (1,), {"y": 2})
    assert [(rank, args, kwargs) for rank, args, kwargs in by_rank(call)] == [(0, (1,), {"y": 2})]
    assert call.gather.collect == "first"


def test_shards_are_views_of_the_callers_memory_and_leaves_that_keep_requires_grad() -> None:
    tensor, array = torch.zeros(8, 2, requires_grad=True), np.zeros((8, 2))
    call = plan(spec_of(Dispatch.DP_COMPUTE_PROTO), FOUR, (tensor, array), {})
    (piece, part), _ = list(call.arguments())[1]
    assert piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert (piece.requires_grad, piece.is_leaf) == (True, True)
    assert np.shares_memory(part, array)


def test_replicated_leaves_of_a_split_structure_are_sent_whole_and_stored_once() -> None:
    table, note = torch.zeros(100), "the same for all"
    batch = {"ids": torch.arange(4), "table": replicate(table), "note": note, "scale": 0.5}
    call = plan(spec_of(Dispatch.DP_COMPUTE_PROTO), FOUR, (batch,), {"codes": replicate((7, 8))})
    args, kwargs = list(call.arguments())[2]
    assert args[0]["table"] is table
    assert kwargs == {"codes": (7, 8)}
    assert [id(value) for value in call.shared] == [id(table), id(note)]


@pytest.mark.parametrize(
    ("rows", "pieces", "trim"),
    [
        (5, [[0, 1, 2, 0], [3, 4, 3, 4]], [(4, 3), (4, 2)]),
        (1, [[0, 0, 0, 0], []], [(4, 1), (0, 0)]),
        (8, [[0, 1, 2, 3], [4, 5, 6, 7]], None),
    ],
)
def test_padding_repeats_the_rows_of_a_shard_from_its_first_and_leaves_an_empty_shard(
    rows: int, pieces: list[list[int]], trim: Any
) -> None:
    call = plan(spec_of(Dispatch.ROWS, pad_to_multiple=4), FakeTarget(2), (torch.arange(rows),), {})
    assert [args[0].tolist() for _, args, _ in by_rank(call)] == pieces
    assert call.gather.trim == trim

    on_one = plan(spec_of(Dispatch.RANK_ZERO, pad_to_multiple=4), FakeTarget(2), ([0, 1],), {}, ranks=(1,))
    assert by_rank(on_one) == [(1, ([0, 1],), {})]


def test_peers_of_a_dp_coordinate_share_a_shard_of_a_future_which_has_its_padding() -> None:
    call = plan(spec_of(Dispatch.mesh()), meshed(dp=2, tp=2), (FakeFuture(None),), {})
    pieces = [args[0] for _, args, _ in by_rank(call)]
    assert pieces[0] is pieces[1]
    assert (pieces[2].shard.index, pieces[2].shard.count) == (1, 2)

    padded = spec_of(Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=4)
    call = plan(padded, TWO, (FakeFuture(None), torch.arange(5)), {})  # another argument has rows
    assert next(call.arguments())[0][0].shard.pad_to_multiple == 4
    assert call.gather.trim == [(4, 3), (4, 2)]


def test_futures_in_a_dealt_list_go_to_their_ranks_and_a_future_of_a_list_is_waited_for() -> None:
    one, two = FakeFuture(1), FakeFuture(2)
    call = plan(spec_of(Dispatch.DP_COMPUTE), TWO, ([one, two],), {})
    assert [args[0] for _, args, _ in by_rank(call)] == [one, two]

    whole = (FakeFuture([1, 2]),)
    call = plan(spec_of(Dispatch.ALL_TO_ALL), TWO, whole, {})
    assert [args[0] for _, args, _ in by_rank(call)] == [1, 2]


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(Dispatch.mesh(balance=lambda x: x)),
        spec_of(Dispatch.mesh(group_size=2)),
        spec_of(Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=2),
    ],
)
def test_balanced_grouped_and_padded_plans_wait_for_a_future(spec: Any) -> None:
    call = plan(spec, meshed(dp=2), (FakeFuture(torch.arange(6)),), {})
    assert sum(call.rows or ()) == 6


def test_a_custom_dispatch_function_gets_the_value_of_a_future() -> None:
    seen: list[Any] = []
    mode = custom_mode(lambda group, x: (seen.append(x), (([x, x],), {}))[1], lambda group, outputs: outputs)
    plan(spec_of(mode), TWO, (FakeFuture(torch.ones(1)),), {})
    assert torch.equal(seen[0], torch.ones(1))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("DP_COMPUTE", Dispatch.ALL_TO_ALL),
        ("DP_COMPUTE_PROTO", Dispatch.ROWS),
        ("DP_COMPUTE_PROTO_WITH_FUNC", Dispatch.ROWS),
        ("DP_COMPUTE_METRIC", collecting(Dispatch.ROWS, "list")),
        ("MEGATRON_COMPUTE_PROTO", Dispatch.mesh()),
        ("MEGATRON_PP_AS_DP_PROTO", Dispatch.mesh(pp_as_dp=True)),
    ],
)
def test_modes_with_verls_names_equal_their_native_modes_and_no_others(name: str, mode: Any) -> None:
    assert Dispatch[name] == mode
    assert hash(Dispatch[name]) == hash(mode)
    assert repr(Dispatch[name]) == f"Dispatch.{name}"
    assert mode not in (Dispatch.ONE_TO_ALL, Dispatch.mesh("b"))


@pytest.mark.parametrize(
    ("collect", "value"), [("join", [7, 7, 7, 7]), ("list", [[7]] * 4), ("first", [7]), ("none", None)]
)
def test_outputs_of_one_to_all_are_collected_as_declared(collect: str, value: Any) -> None:
    assert run(spec_of(collecting(Dispatch.ONE_TO_ALL, collect)), FOUR, [7]) == value


def test_a_collect_function_gets_the_outputs_of_a_mesh_by_dp_coordinate() -> None:
    seen: list[Any] = []
    mode = collecting(Dispatch.mesh("actor"), lambda group, outputs: seen.extend(outputs) or len(outputs))

    assert run(spec_of(mode), meshed(dp=2, tp=2, pp=2), [1, 2, 3]) == 2
    assert seen == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("collect", "value"),
    [
        ("list", [[0, 1, 2], [3, 4]]),
        (lambda group, outputs: outputs, [[0, 1, 2], [3, 4]]),
        ("first", [0, 1, 2]),
    ],
)
def test_padding_is_removed_for_every_way_to_collect(collect: Any, value: Any) -> None:
    spec = spec_of(collecting(Dispatch.ROWS, collect), pad_to_multiple=4)

    assert run(spec, FakeTarget(2), [0, 1, 2, 3, 4]) == value
