"""What the garbage collector of a program of verl's leaves out while the program is still importing."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType

import pytest

from phalanx.compat.verl.collector import spare_imports


class Node:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A collector that comes to the oldest objects soon, and whose settings come back."""
    before, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.unfreeze()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.callbacks[:] = callbacks
    gc.unfreeze()


@pytest.fixture
def some_modules() -> Iterator[None]:
    names = [f"_imported_{number}" for number in range(20)]
    spare_imports()
    sys.modules.update((name, ModuleType(name)) for name in names)
    yield
    for name in names:
        sys.modules.pop(name, None)


def enough_for_all_generations() -> list[list[int]]:
    seen = gc.get_stats()[2]["collections"]
    kept: list[list[int]] = []
    while gc.get_stats()[2]["collections"] == seen:
        kept.append([])
    return kept


def test_what_is_there_while_modules_come_is_left_out_of_later_collections(some_modules: None) -> None:
    enough_for_all_generations()

    assert gc.get_freeze_count() > 10_000


def test_once_no_modules_come_the_collector_works_as_before() -> None:
    callbacks = len(gc.callbacks)
    spare_imports()
    frozen = gc.get_freeze_count()

    enough_for_all_generations()
    garbage = weakref.ref(Node())
    enough_for_all_generations()

    assert garbage() is None
    assert gc.get_freeze_count() <= frozen
    assert len(gc.callbacks) == callbacks


def test_a_collection_that_is_asked_for_frees_garbage_also_while_modules_come(some_modules: None) -> None:
    gc.set_threshold(0)
    garbage = weakref.ref(Node())

    gc.collect()

    assert garbage() is None


def test_asking_twice_is_asking_once() -> None:
    gc.set_threshold(0)  # it takes itself away when the collector has gone through all
    spare_imports()
    callbacks = len(gc.callbacks)

    spare_imports()

    assert len(gc.callbacks) == callbacks
