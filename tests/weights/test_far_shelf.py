"""What a rank does with buckets in an object store, whatever that store is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx as px
from phalanx.weights.worker.bucket_store import OnShelf, RankShelf


def shelf(fetched: Any) -> RankShelf:
    """A target's, which is given bucket 0 of source 0; ``fetched`` is what comes of it, or is raised."""

    def fetch(ref: Any, timeout: float) -> Any:
        if isinstance(fetched, Exception):
            raise fetched
        return fetched

    made = RankShelf(lambda value: value, fetch)
    made.given = {0: OnShelf({0: "ref"})}
    return made


def test_what_was_stored_is_read_where_it_lies() -> None:
    stored = torch.arange(4, dtype=torch.uint8).numpy()
    stored.setflags(write=False)
    got = shelf(stored).get(0, 0, 1.0)
    assert got.data_ptr() == stored.ctypes.data


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (TimeoutError(), "did not come out of the object store within 1.5 s"),
        (RuntimeError("the owner died"), "its process or its node was lost"),
    ],
)
def test_a_bucket_that_cannot_be_had_names_its_source(raised: Exception, text: str) -> None:
    with pytest.raises(px.weights.WeightsTransferError, match=f"source rank 0 .*{text}") as caught:
        shelf(raised).get(0, 0, 1.5)
    assert caught.value.peer == "source rank 0"


def test_a_bucket_that_was_never_stored_names_its_source() -> None:
    with pytest.raises(px.weights.WeightsTransferError, match="source rank 0 has not stored bucket 3"):
        shelf(None).get(0, 3, 1.0)


def test_a_source_holds_nothing_of_what_it_has_handed_over() -> None:
    made = RankShelf(lambda value: value, lambda ref, timeout: ref)
    made.put(0, 0, torch.zeros(4, dtype=torch.uint8))
    handed = made.handed_over()
    assert list(handed.refs) == [0]
    assert made.mine == OnShelf()
