"""A group of engines of several ranks each grows and shrinks while it works."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import phalanx as px

SOAK_ON_RAY = True
TP = 2


class Engine(px.Worker):
    """A rank of an engine. All ranks of an engine run each of its calls."""

    independent = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    @px.register(px.Dispatch.mesh())
    def answers(self, prompts: list[int]) -> list[int]:
        return [10 * prompt for prompt in prompts]

    @px.register(px.Dispatch.mesh())
    def answer(self, prompt: int) -> tuple[int, int, int]:
        self.asked.append(prompt)
        return self.mesh().coordinate(self.rank, "dp"), len(self.asked), 10 * prompt

    @px.register
    def places(self) -> tuple[int, int, dict[str, int]]:
        return self.rank, self.world_size, dict(self.mesh().sizes)

    @px.register
    def seen(self) -> list[int]:
        return self.asked


def engines(pool: px.ResourcePool) -> px.WorkerGroup:
    """Start as many engines as fit into the pool."""
    return px.WorkerGroup(pool, Engine, mesh=px.Mesh(dp=-1, tp=TP))


def test_engines_join_and_leave_completely_and_remaining_ranks_keep_number_and_process(
    eight: px.ResourcePool,
) -> None:
    group = engines(eight)
    before = group.core.endpoints
    for count in (2, 3, 1):
        px.resize(group, count)

        size = count * TP
        assert group.places() == [(rank, size, {"dp": count, "tp": TP}) for rank in range(size)]
        assert group.answers(list(range(7))) == [10 * prompt for prompt in range(7)]
        assert group.mesh().sizes == (("dp", count), ("tp", TP))
        assert group.core.endpoints[:2] == before[:2]


@pytest.mark.slow_on_cluster
def test_each_request_during_a_resize_reaches_one_complete_engine_once(eight: px.ResourcePool) -> None:
    group = engines(eight)
    px.resize(group, 2)
    seen: dict[int, list[int]] = {}
    futures: list[px.CallFuture[Any]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set() or len(futures) < 60:
            futures.append(group.any.answer.submit(len(futures)))
            if len(futures) % 10 == 0:
                futures[-1].result()

    thread = threading.Thread(target=ask)
    thread.start()
    for count in (4, 1):
        px.resize(group, count)
    over.set()
    thread.join(60)
    for number, future in enumerate(futures):
        engine, turn, answer = future.result()
        seen.setdefault(engine, []).append(turn)
        assert answer == 10 * number

    assert all(sorted(turns) == list(range(1, len(turns) + 1)) for turns in seen.values())
    mine, peers = group.seen()
    assert mine == peers


@pytest.mark.parametrize("tp", [TP, 1], ids=["engines", "ranks"])
def test_sticky_routing_follows_a_resize_and_a_restart_keeps_the_number_of_engines(
    eight: px.ResourcePool, tp: int
) -> None:
    group = px.WorkerGroup(eight[: 4 * tp], Engine, mesh=px.Mesh(dp=-1, tp=tp))
    methods = {key: px.engines.sticky(group, key).answer for key in "abcd"}
    before = {key: answer(1)[0] for key, answer in methods.items()}
    px.resize(group, 2)
    after = {key: answer(1)[0] for key, answer in methods.items()}

    assert sorted(before.values()) == [0, 1, 2, 3]
    assert set(after.values()) <= {0, 1}
    assert all(after[key] == engine for key, engine in before.items() if engine < 2)
    group.restart()
    assert group.places() == [(rank, 2 * tp, {"dp": 2, "tp": tp}) for rank in range(2 * tp)]


class Registered(px.Worker):
    """Registers its own place in the mesh of engines."""

    independent = True

    def __init__(self) -> None:
        self.register_mesh("engine", {"dp": self.rank // TP, "tp": self.rank % TP})

    @px.register(px.Dispatch.mesh("engine"))
    def answers(self, prompts: list[int]) -> list[tuple[int, int]]:
        return [(self.rank // TP, prompt) for prompt in prompts]


def test_engines_of_a_mesh_registered_by_the_ranks_are_resized(eight: px.ResourcePool) -> None:
    group = px.WorkerGroup(eight, Registered)
    px.resize(group, 2)
    fewer = group.answers([1, 2, 3])
    px.resize(group, 3)

    assert fewer == [(0, 1), (0, 2), (1, 3)]
    assert group.answers([1, 2, 3]) == [(0, 1), (1, 2), (2, 3)]


def test_impossible_resizes_of_engines_are_refused_with_advice(eight: px.ResourcePool) -> None:
    group = engines(eight)
    with pytest.raises(px.PlacementError, match=r"5 engines of 2 ranks take 10; pool\.grow\(2\)"):
        px.resize(group, 5)
    with pytest.raises(px.DeclarationError, match="engines, of 2 ranks each, 1 or more"):
        px.resize(group, 0)
    group.close()
    for mesh in (px.Mesh(tp=TP, dp=-1), px.Mesh(pp=8)):
        odd = px.WorkerGroup(eight, Engine, mesh=mesh)
        with pytest.raises(px.DeclarationError, match=r"dp, as the slowest"):
            px.resize(odd, 2)
        odd.close()
