"""What a worker process gives back of an output that may be handed on by reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import phalanx as px
from phalanx.wire.codec import decode
from phalanx.wire.messages import BackendRef
from phalanx.worker.call_values import encoded

SLOW_ON_RAY = True


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
