"""What a worker process gives back of an output that may be handed on by reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px
from phalanx.collect.join import whole
from phalanx.execution.results import described, encoded
from phalanx.runtime.groups import core
from phalanx.wire.codec import Encoded, decode
from phalanx.wire.outputs import DESCRIBED, HALVED, OUTPUT, BackendRef, with_rests

LARGE = 128  # columns of float32 that make 1024 rows large enough to be halved


def given_back(output: Any) -> Any:
    _, first, rest = described(output, halves=True)
    values = [decode(value.to_bytes()) if isinstance(value, Encoded) else value for value in (first, rest)]
    return whole(with_rests(values[:1], values[1:])[0])


def test_a_large_output_of_rows_is_stored_in_two_halves() -> None:
    info, first, rest = described(torch.ones(1025, LARGE), halves=True)
    assert (info.rows, info.first_rows) == (1025, 513)
    assert first.nbytes > rest.nbytes > 0


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(4, 4),
        torch.ones(1, 1 << 20),
        {"x": torch.ones(1024, LARGE), "loss": 0.5},
        {"x": torch.ones(1024, LARGE), "loss": torch.tensor(0.5)},
        torch.ones(1024, LARGE, requires_grad=True),
        {"x": torch.ones(1024, LARGE), "names": ["a"] * 1024},
        {"x": torch.ones(1024, LARGE), "y": torch.ones(3)},
    ],
    ids=["small", "one row", "without rows", "a tensor without rows", "with grad", "a list", "other rows"],
)
def test_any_other_output_is_stored_as_one(output: Any) -> None:
    _, _, rest = described(output, halves=True)
    assert rest is None


def test_on_one_node_an_output_is_stored_whole() -> None:
    info, output = described(torch.ones(1025, LARGE), halves=False)
    assert (info.rows, info.first_rows) == (1025, 1025)
    assert output.nbytes >= 1025 * LARGE * 4


@settings(deadline=None)
@given(rows=st.integers(2, 40), columns=st.integers(1, 5), as_dict=st.booleans())
def test_halves_joined_are_the_output(rows: int, columns: int, as_dict: bool) -> None:
    tensor = torch.arange(rows * columns * 40_000, dtype=torch.int32).view(rows, columns, -1)
    output = {"x": tensor, "y": tensor[:, 0].numpy()} if as_dict else tensor
    back = given_back(output)
    assert torch.equal(back["x"] if as_dict else back, tensor)


class Maker(px.Worker):
    @px.register(px.Dispatch.DP_COMPUTE_PROTO)
    def make(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": rows[:, None].repeat(1, 1024), "rank": torch.full((len(rows),), self.rank)}

    @px.register(px.Dispatch.DP_COMPUTE_PROTO, pad_to_multiple=64)
    def make_padded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, None].repeat(1, 1024)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def firsts(self, made: dict[str, torch.Tensor]) -> list[float]:
        return made["x"][:, 0].tolist()

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def share(self, made: dict[str, torch.Tensor]) -> tuple[list[float], list[int]]:
        return made["x"][:, 0].tolist(), made["rank"].tolist()


@pytest.fixture(scope="module", params=[HALVED, DESCRIBED], ids=["in halves", "whole"], autouse=True)
def returns(request: pytest.FixtureRequest) -> Iterator[None]:
    """How outputs that may be handed on are stored; else it depends on the nodes on which groups lie."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(core.GroupCore, "_returns", lambda _, describe: request.param if describe else OUTPUT)
        yield


@pytest.fixture(scope="module")
def group(backend: str) -> Iterator[px.WorkerGroup]:
    with px.ResourcePool([2], use_gpu=False, backend=backend) as pool, px.WorkerGroup(pool, Maker) as made:
        yield made


ROWS = torch.arange(257, dtype=torch.float32)


def test_the_driver_gets_the_rows_in_order(group: px.WorkerGroup) -> None:
    value = group.make.submit(ROWS).result()
    assert torch.equal(value["x"][:, 0], ROWS)
    assert value["rank"].tolist() == [0] * 129 + [1] * 128


def test_a_stream_gives_each_output_whole(group: px.WorkerGroup) -> None:
    sizes = {rank: len(output["x"]) for rank, output in group.make.stream(ROWS)}
    assert sizes == {0: 129, 1: 128}


def test_padding_is_removed(group: px.WorkerGroup) -> None:
    assert torch.equal(group.make_padded.submit(ROWS).result()[:, 0], ROWS)


def test_a_result_reaches_every_rank_whole(group: px.WorkerGroup) -> None:
    assert group.firsts(group.make.submit(ROWS)) == [ROWS.tolist()] * 2


def test_a_result_is_dealt_in_rows(group: px.WorkerGroup) -> None:
    shares = group.share(group.make.submit(ROWS))
    assert [value for values, _ in shares for value in values] == ROWS.tolist()


class CountedByTheBackend:
    """A reference that only its backend may pickle: for anybody else it would live for ever."""

    def __reduce__(self) -> str:
        raise AssertionError("pickled past the backend")


def test_a_reference_within_an_output_is_left_for_the_backend_to_pickle() -> None:
    ref = BackendRef(CountedByTheBackend())
    made = encoded({"rows": torch.ones(3), "refs": [ref]})
    assert list(made.tokens) == [ref]
    assert decode(made)["refs"] == [ref]
