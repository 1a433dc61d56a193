"""What a rank's process does while it imports the users' modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import phalanx as px
from phalanx.worker.bootstrap import importing


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_collecting_goes_on_as_before_also_where_an_import_fails() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with importing():
        assert gc.get_threshold()[0] == 0  # nothing is collected meanwhile
    assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.isenabled()) == (before, True)
    with pytest.raises(ImportError), importing():
        raise ImportError("no such module")
    assert (gc.get_threshold(), gc.isenabled()) == (before, True)
    with importing():
        gc.set_threshold(50_000, 20, 20)
    assert gc.get_threshold() == (50_000, 20, 20)  # what a module sets stands


@pytest.mark.slow
def test_a_rank_collects_garbage(ray_cluster: Any) -> None:
    class Sees(px.Worker):
        @px.register
        def settings(self) -> tuple[tuple[int, int, int], bool, int]:
            return gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()

    with px.ResourcePool([1], use_gpu=False, backend="ray") as pool, px.WorkerGroup(pool, Sees) as group:
        threshold, enabled, frozen = group.settings()[0]
    assert threshold == gc.get_threshold()
    assert enabled
    assert frozen > 10_000
