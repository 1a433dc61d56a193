"""Modes that split over the dp coordinates of a mesh."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

from phalanx.declare.dispatch_modes import Dispatch
from phalanx.dispatch.modes import plan
from phalanx.dispatch.shardable import replicate
from phalanx.errors import DispatchError
from phalanx.topology.mesh import Mesh
from tests.dispatch.support import FakeTarget, meshed, run, spec_of


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.arange(4),), {"lengths": [9, 1, 1, 7]}),
        (({"x": np.arange(4), "lengths": torch.tensor([9, 1, 1, 7])},), {}),
        ((TensorDict({"lengths": torch.tensor([9.0, 1.0, 1.0, 7.0])}, batch_size=[4]),), {}),
        ((torch.arange(4),), {"lengths": list(np.array([9, 1, 1, 7]))}),
        ((pa.table({"lengths": [9, 1, 1, 7]}),), {}),
        ((defaultdict(list, x=list(range(4))), {"lengths": [9, 1, 1, 7]}), {}),
        (({"lengths": None}, {"lengths": [9, 1, 1, 7]}), {}),
    ],
)
def test_rows_are_balanced_by_an_argument_or_by_a_key_of_a_batch(args: Any, kwargs: Any) -> None:
    call = plan(spec_of(Dispatch.mesh("actor", balance="lengths")), meshed(dp=2), args, kwargs)
    assert call.gather.order == [0, 1, 2, 3]
    assert call.rows == [1, 3]


def test_a_balance_function_gets_the_arguments() -> None:
    def lengths(x: Any, scale: int) -> Any:
        return x.sum(-1) * scale

    spec = spec_of(Dispatch.mesh("actor", balance=lengths))
    x = torch.tensor([[9, 0], [0, 1], [1, 0], [7, 0]])
    assert plan(spec, meshed(dp=2), (x,), {"scale": replicate(2)}).rows == [1, 3]


@pytest.mark.parametrize(
    ("balance", "text"),
    [
        ("tokens", "neither an argument nor a key"),
        ("n", r"update\(\).*balance=n: the length of row 1 is nan"),
        (lambda x, n: [1, 2], "got a list of 2 elements; expected one number for each of the 4 rows"),
    ],
)
def test_a_balance_without_a_finite_length_per_row_is_refused(balance: Any, text: str) -> None:
    with pytest.raises(DispatchError, match=text):
        given = {"x": torch.zeros(4, 2), "n": [1, float("nan"), 1, 1]}
        plan(spec_of(Dispatch.mesh("actor", balance=balance)), meshed(dp=2), (), given)


def test_outputs_of_balanced_rows_are_in_input_order_unless_their_counts_do_not_match() -> None:
    spec = spec_of(Dispatch.mesh("actor", balance="lengths"))
    given = {"x": torch.arange(5), "lengths": [1, 9, 2, 8, 3]}

    several = run(spec, meshed(dp=2, tp=2), method=lambda x, lengths: x.repeat_interleave(3), **given)
    odd = run(spec, meshed(dp=2), method=lambda x, lengths: [len(lengths), -1, -2], **given)

    assert several.tolist() == [row for row in range(5) for _ in range(3)]
    assert (odd[1:3], odd[0] + odd[3]) == ([-1, -2], 5)


def test_groups_of_rows_stay_together_and_a_mesh_of_another_size_is_refused() -> None:
    grouped = spec_of(Dispatch.mesh("actor", group_size=4))
    assert plan(grouped, meshed(dp=2), (list(range(12)),), {}).rows == [8, 4]
    with pytest.raises(DispatchError, match="7 rows cannot be kept in groups"):
        plan(grouped, meshed(dp=2), (list(range(7)),), {})
    target = FakeTarget(4, {"default": Mesh(dp=2)})
    with pytest.raises(DispatchError, match="of 2 ranks, but the group has 4"):
        plan(spec_of(Dispatch.mesh()), target, ([1, 2],), {})
