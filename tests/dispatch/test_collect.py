"""What ``collect=`` makes of the outputs, for each mode."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.declare.dispatch_modes import COLLECTS, Dispatch, Execute, collecting, custom_mode
from phalanx.declare.register import register
from phalanx.errors import DeclarationError
from tests.dispatch.support import FakeTarget, meshed, run, spec_of

FOUR = FakeTarget(4)


def collected(mode: Any, collect: Any) -> Any:
    return spec_of(collecting(mode, collect))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("DP_COMPUTE", Dispatch.ALL_TO_ALL),
        ("DP_COMPUTE_PROTO", Dispatch.ROWS),
        ("DP_COMPUTE_METRIC", collecting(Dispatch.ROWS, "list")),
        ("MEGATRON_COMPUTE_PROTO", Dispatch.mesh()),
        ("MEGATRON_PP_AS_DP_PROTO", Dispatch.mesh(pp_as_dp=True)),
    ],
)
def test_names_of_verl_are_equal_to_the_native_modes(name: str, mode: Any) -> None:
    assert Dispatch[name] == mode
    assert hash(Dispatch[name]) == hash(mode)
    assert repr(Dispatch[name]) == f"Dispatch.{name}"


def test_modes_that_do_different_things_are_not_equal() -> None:
    assert Dispatch.ROWS != Dispatch.DP_COMPUTE_METRIC
    assert Dispatch.mesh("a") != Dispatch.mesh("b")
    assert Dispatch.ONE_TO_ALL != Dispatch.ALL_TO_ALL


@pytest.mark.parametrize(
    ("collect", "value"), [("join", [7, 7, 7, 7]), ("list", [[7]] * 4), ("first", [7]), ("none", None)]
)
def test_the_same_to_all_is_collected_as_declared(collect: str, value: Any) -> None:
    assert run(collected(Dispatch.ONE_TO_ALL, collect), FOUR, [7]) == value


def test_a_function_gets_the_outputs_of_a_mesh_by_dp_coordinate() -> None:
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
def test_padding_is_undone_however_outputs_are_collected(collect: Any, value: Any) -> None:
    spec = spec_of(collecting(Dispatch.ROWS, collect), pad_to_multiple=4)

    assert run(spec, FakeTarget(2), [0, 1, 2, 3, 4]) == value


def test_a_custom_mode_collects_by_its_own_function() -> None:
    mode = custom_mode(print, len, "PAIRED")

    with pytest.raises(DeclarationError, match="PAIRED, which has a collect function of its own"):
        register(mode, collect="list")


@pytest.mark.parametrize("collect", ["join", "list", len])
def test_one_output_is_the_value_already(collect: Any) -> None:
    for given in ({"dispatch_mode": Dispatch.RANK_ZERO}, {"execute_mode": Execute.RANK_ZERO}):
        with pytest.raises(DeclarationError, match="only rank 0 runs the method"):
            register(**given, collect=collect)


@pytest.mark.parametrize("collect", COLLECTS)
def test_what_cannot_be_called_collects_nothing(collect: str) -> None:
    with pytest.raises(DeclarationError, match="DIRECT_ROLLOUT_METHOD"):
        register(Dispatch.DIRECT_ROLLOUT_METHOD, collect=collect)
