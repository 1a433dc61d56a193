"""Dispatch modes that consist of two functions of the user."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.declare.dispatch_modes import Execute, as_mode, custom_mode
from phalanx.dispatch.modes import plan
from phalanx.errors import DispatchError
from tests.dispatch.support import FakeTarget, by_rank, spec_of

FOUR = FakeTarget(4)


def two_to_all_dispatch_fn(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        assert len(value) == 2
        for i in range(worker_group.world_size - 2):
            value.append(value[i % 2])
    return args, kwargs


def as_they_are(group: Any, outputs: list[Any]) -> list[Any]:
    return outputs


TWO_TO_ALL = as_mode({"dispatch_fn": two_to_all_dispatch_fn, "collect_fn": as_they_are})


def test_a_dispatch_function_does_not_change_the_callers_list_and_raises_its_own_errors() -> None:
    x = [1, 2]
    plan(spec_of(TWO_TO_ALL), FOUR, (x,), {})
    assert x == [1, 2]
    with pytest.raises(AssertionError):
        plan(spec_of(TWO_TO_ALL), FOUR, ([1, 2, 3],), {})


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, r"returned None; expected a pair \(args, kwargs\)"),
        (([1],), r"returned a tuple of 1 elements; expected a pair"),
        ((([1, 2],), {}), r"made 'x' a list of 2 elements; expected a list of world_size = 4"),
        (((), {"k": 5}), r"made 'k' an int; expected a list of world_size = 4"),
    ],
)
def test_a_dispatch_function_with_an_invalid_result_is_named_in_the_error(result: Any, text: str) -> None:
    def my_dispatch(group: Any, *args: Any) -> Any:
        return result

    with pytest.raises(DispatchError, match=rf"my_dispatch {text}"):
        plan(spec_of(custom_mode(my_dispatch, as_they_are), lambda x: x), FOUR, (1,), {})


def test_a_dispatch_function_sees_the_size_of_a_slice_and_rank_zero_gets_first_elements() -> None:
    call = plan(spec_of(TWO_TO_ALL), FakeTarget(9), ([1, 2],), {}, ranks=[4, 5, 8], handle=FakeTarget(3))
    assert [(rank, args) for rank, args, _ in by_rank(call)] == [(4, (1,)), (5, (2,)), (8, (1,))]

    call = plan(spec_of(TWO_TO_ALL, execute=Execute.RANK_ZERO), FOUR, ([1, 2],), {"y": [5, 6]})
    assert by_rank(call) == [(0, (1,), {"y": 5})]
    assert call.gather.collect == "first"
