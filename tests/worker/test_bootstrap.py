"""Garbage collection while a rank imports the user's modules."""

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


def test_garbage_collection_is_restored_after_successful_and_failed_imports() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with importing():
        assert gc.get_threshold()[0] == 0  # no collection during imports
    assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.isenabled()) == (before, True)
    with pytest.raises(ImportError), importing():
        raise ImportError("no such module")
    assert (gc.get_threshold(), gc.isenabled()) == (before, True)
    with importing():
        gc.set_threshold(50_000, 20, 20)
    assert gc.get_threshold() == (50_000, 20, 20)  # settings of a module are kept


@pytest.mark.slow
def test_garbage_collection_is_enabled_on_a_rank(ray_cluster: Any) -> None:
    def settings(worker: px.Worker) -> tuple[tuple[int, int, int], bool, int]:
        return gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()

    with px.ResourcePool([1], use_gpu=False, backend="ray") as pool, px.WorkerGroup(pool, px.Worker) as group:
        threshold, enabled, frozen = group.run(settings)[0]
    assert threshold == gc.get_threshold()
    assert enabled
    assert frozen > 10_000
