"""Subclasses of containers keep their type when split and joined. Unsplittable values are refused."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from phalanx.collect.join import join_rows
from phalanx.declare.dispatch_modes import Dispatch
from phalanx.dispatch.modes import plan
from phalanx.dispatch.split import split_rows
from phalanx.errors import DispatchError
from tests.dispatch.support import FakeTarget, spec_of


class Config(dict[str, Any]):
    """A dict with its keys as attributes. A missing attribute is a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Own(dict[str, Any]):
    """A dict that is its own ``__dict__``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Tagged(list[Any]):
    __slots__ = ("__hidden", "tag")

    def __init__(self, rows: Any, tag: str) -> None:
        super().__init__(rows)
        self.tag, self.__hidden = tag, tag

    @property
    def hidden(self) -> str:
        return self.__hidden


class Strict(dict[str, Any]):
    """A dict that refuses assignments and needs a name."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(**items)
        self.name = name

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read only")


class Renewed(collections.UserDict[str, Any]):
    kind = "own"


ROWS_OF_X = spec_of(Dispatch.DP_COMPUTE_PROTO, lambda x: x)
MAKERS: list[Any] = [Config, Own, collections.OrderedDict, collections.Counter, Renewed]
MAKERS += [functools.partial(Strict, "s"), functools.partial(collections.defaultdict, list)]


@pytest.mark.parametrize("make", MAKERS)
@given(st.lists(st.integers(), max_size=7), st.integers(1, 4))
def test_a_subclass_of_dict_keeps_its_type_and_items(make: Any, rows: list[int], parts: int) -> None:
    whole = make(x=rows, temp=0.7)
    pieces = split_rows(whole, parts)
    joined = join_rows(pieces)
    assert {type(each) for each in [*pieces, joined]} == {type(whole)}
    assert joined == whole == make(x=rows, temp=0.7)


def test_a_subclass_of_dict_keeps_its_attributes() -> None:
    assert join_rows(split_rows(Strict("s", x=[1, 2]), 2)).name == "s"
    assert split_rows(Own(x=[1, 2]), 2)[1].x == [2]
    assert split_rows(collections.defaultdict(list, x=[1, 2]), 2)[1]["new"] == []


def test_an_argument_that_raises_stop_iteration_is_not_left_out() -> None:
    ended = type("Ended", (dict,), dict.fromkeys(["items", "values"], iter(()).__next__))(x=1)
    with pytest.raises(StopIteration):
        plan(spec_of(Dispatch.ALL_TO_ALL), FakeTarget(2), ([1, ended],), {})


@given(st.lists(st.integers(), max_size=7), st.integers(1, 4))
def test_a_subclass_of_list_keeps_its_type_and_attributes(rows: list[int], parts: int) -> None:
    pieces = split_rows(Tagged(rows, "t"), parts)
    joined = join_rows(pieces)
    assert {(type(each), each.tag, each.hidden) for each in [*pieces, joined]} == {(Tagged, "t", "t")}
    assert joined == rows


def test_a_locked_tensordict_stays_locked() -> None:
    whole = TensorDict({"x": torch.arange(4)}, batch_size=[4]).lock_()
    pieces = split_rows(whole, 2)
    assert [each.is_locked for each in [*pieces, join_rows(pieces)]] == [True] * 3
    assert not join_rows(split_rows(TensorDict({"x": torch.arange(4)}, batch_size=[4]), 2)).is_locked


def test_a_value_that_contains_itself_can_be_replicated_but_not_split_or_joined() -> None:
    loop: dict[str, Any] = {"x": 1}
    loop["loop"] = loop
    seen = plan(spec_of(Dispatch.ONE_TO_ALL), FakeTarget(2), (loop,), {}).arguments()
    assert list(seen)[1][0] == (loop,)
    with pytest.raises(DispatchError, match=r"update\(\).*: x is a dict that holds itself"):
        plan(ROWS_OF_X, FakeTarget(2), (loop,), {})
    rows: list[Any] = [1]
    rows.append(rows)
    with pytest.raises(DispatchError, match="holds itself"):
        join_rows([rows, [2]])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_tensor_with_an_unsplittable_layout_is_refused_with_its_path() -> None:
    batch = {"m": torch.eye(4).to_sparse_csr()}
    with pytest.raises(DispatchError, match=r"x\['m'\], a Tensor of layout torch\.sparse_csr"):
        plan(ROWS_OF_X, FakeTarget(2), (batch,), {})
