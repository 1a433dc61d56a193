"""Values that ``collect=`` makes of outputs, for each mode."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.declare.dispatch_modes import Dispatch, collecting
from tests.dispatch.support import FakeTarget, meshed, run, spec_of

FOUR = FakeTarget(4)


def collected(mode: Any, collect: Any) -> Any:
    return spec_of(collecting(mode, collect))


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
    assert run(collected(Dispatch.ONE_TO_ALL, collect), FOUR, [7]) == value


def test_a_collect_function_gets_the_outputs_of_a_mesh_by_dp_coordinate() -> None:
    seen: list[Any] = []
    spec = collected(Dispatch.mesh("actor"), lambda group, outputs: seen.extend(outputs) or len(outputs))

    assert run(spec, meshed(dp=2, tp=2, pp=2), [1, 2, 3]) == 2
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
