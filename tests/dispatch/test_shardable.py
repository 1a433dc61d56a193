"""Row types, structures, and the row functions for custom modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from phalanx.collect.join import join_rows
from phalanx.dispatch.split import count_rows, split_rows
from phalanx.errors import DispatchError
from tests.dispatch.support import FakeFuture


@dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor
    scale: float
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.scale, float):
            raise TypeError("scale")
        object.__setattr__(self, "total", len(self.ids))

    @functools.cached_property
    def longest(self) -> int:
        return int(self.ids.max())


def test_a_tensor_subclass_has_rows_and_a_tensordict_without_batch_size_has_none() -> None:
    class Special(torch.Tensor): ...

    assert count_rows(torch.zeros(3).as_subclass(Special)) == 3
    assert count_rows(torch.nn.Parameter(torch.zeros(4))) == 4
    assert count_rows(TensorDict({"x": torch.arange(3)}, batch_size=[])) is None


def test_leaves_with_equal_paths_and_different_row_counts_are_refused() -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    with pytest.raises(DispatchError, match=r"value\[key\] has 4, value\[key\] has 2"):
        split_rows({Key(): [1, 2, 3, 4], Key(): [1, 2]}, 2)


@pytest.mark.parametrize("of_rows", [count_rows, lambda value: split_rows(value, 2)])
def test_row_functions_refuse_a_future(of_rows: Callable[[Any], Any]) -> None:
    with pytest.raises(DispatchError, match=r"value\['x'\] is FakeFuture.*pass its \.result\(\)"):
        of_rows({"x": FakeFuture([1])})


def test_a_frozen_dataclass_is_split_and_joined_without_its_constructor_and_cached_properties(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Frozen(torch.tensor([3, 9, 1]), 0.5)
    assert whole.longest == 9
    monkeypatch.delattr(Frozen, "__init__")
    pieces = split_rows(whole, 3)
    assert [piece.longest for piece in pieces] == [3, 9, 1]
    assert (join_rows(pieces).scale, join_rows(pieces).longest) == (0.5, 9)


def test_the_output_of_a_transformers_model_is_split_and_joined_by_field() -> None:
    from transformers.utils.generic import ModelOutput

    @dataclass
    class Output(ModelOutput):
        hidden: torch.Tensor | None = None

    pieces = split_rows(Output(hidden=torch.arange(4.0)), 2)
    assert pieces[1]["hidden"].tolist() == pieces[1].hidden.tolist() == [2.0, 3.0]
    assert join_rows(pieces).hidden.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.arange(n) for n in (1, 0, 3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.arange(n) for n in (1, 0, 3)], layout=torch.strided),
        lambda: torch.nested.narrow(
            torch.arange(15).view(3, 5),
            1,
            torch.tensor([0, 3, 1]),
            torch.tensor([2, 1, 4]),
            layout=torch.jagged,
        ),
        lambda: torch.nested.as_nested_tensor([torch.ones(3, n) for n in (2, 4, 3)], layout=torch.jagged),
        lambda: torch.eye(3).to_sparse(),
    ],
    ids=["jagged", "nested", "jagged with gaps", "ragged in a later dim", "sparse"],
)
def test_nested_and_sparse_tensors_are_split_and_joined_by_rows(make: Callable[[], torch.Tensor]) -> None:
    rows, pieces = [row.to_dense() for row in make().unbind()], split_rows(make(), 2)
    assert [len(piece.unbind()) for piece in pieces] == [2, 1]
    for found in ([row for piece in pieces for row in piece.unbind()], join_rows(pieces).unbind()):
        assert all(map(torch.equal, [row.to_dense() for row in found], rows))
