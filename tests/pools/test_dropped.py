"""Slots of pools that were garbage-collected without ``close()``."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

import phalanx as px
from phalanx.session.session import session
from tests.support.fault_workers import Trouble, within


def dropped(make: Callable[[px.ResourcePool], object], backend: str) -> tuple[object, str]:
    """Return the result of ``make`` on a pool that is never closed, and the name of its reservation."""
    pool = px.ResourcePool([1], use_gpu=False, backend=backend, name_prefix="dropped")
    return make(pool), f"px-{session.run_id}-{pool.name}"


def held(backend: str, name: str) -> bool:
    gc.collect()
    return any(holder.name.startswith(name) for holder in session.get_backend(backend).holders())


KEEPING: dict[str, Callable[[px.ResourcePool], object]] = {
    "a view": lambda pool: pool[0:1],
    "a group": lambda pool: px.WorkerGroup(pool, Trouble),
    "a view of a group": lambda pool: px.WorkerGroup(pool, Trouble)[0:1],
    "a method": lambda pool: px.WorkerGroup(pool, Trouble).ping,
    "a future": lambda pool: px.WorkerGroup(pool, Trouble).ping.submit(),
}


@pytest.mark.parametrize(
    "what", [lambda pool: None, lambda pool: [pool[0:1], px.WorkerGroup(pool, Trouble)].clear()]
)
def test_a_pool_that_was_dropped_without_close_releases_its_slots(
    backend: str, what: Callable[[px.ResourcePool], object]
) -> None:
    _, name = dropped(what, backend)

    assert within(30.0, lambda: not held(backend, name))


@pytest.mark.parametrize("what", KEEPING)
def test_slots_stay_reserved_while_a_view_group_method_or_future_exists(what: str) -> None:
    kept, name = dropped(KEEPING[what], "inline")
    session.queue.flush(30.0)
    still_held = held("inline", name)
    del kept

    assert still_held
    assert within(30.0, lambda: not held("inline", name))
