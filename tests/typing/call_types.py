# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""Types of calls through ``group.method``, for type checkers. Not run: ``make check`` gives it to pyright and mypy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any

from typing_extensions import assert_type

import phalanx as px


def dealt(group: Any, x: int) -> tuple[list[list[int]], dict[str, Any]]:
    return [[x] * group.world_size], {}


def total(group: Any, outputs: list[float]) -> float:
    return sum(outputs)


class Model(px.Worker):
    @px.register
    def bare(self, x: int) -> str:
        return str(x)

    @px.register()
    def default(self, x: int) -> str:
        return self.bare(x)

    @px.register(px.Dispatch.ONE_TO_ALL)
    def one_to_all(self, x: int, *, scale: float = 1.0) -> str:
        return str(x * scale)

    @px.register(px.Dispatch.ALL_TO_ALL)
    def all_to_all(self, x: list[int]) -> str:
        return str(x)

    @px.register(px.Dispatch.ROWS)
    def rows(self, x: list[int]) -> list[str]:
        return [str(i) for i in x]

    @px.register(px.Dispatch.mesh("actor", group_size=2), pad_to_multiple=4)
    def mesh_rows(self, x: list[int]) -> list[str]:
        return [str(i) for i in x]

    @px.register(px.Dispatch.RANK_ZERO)
    def rank_zero(self) -> str:
        return ""

    @px.register(px.Dispatch.DP_COMPUTE_METRIC)
    def metric(self, x: list[int]) -> float:
        return float(len(x))

    @px.register(px.Dispatch.ONE_TO_ALL, execute_mode=px.Execute.RANK_ZERO)
    def executed_on_zero(self) -> str:
        return ""

    @px.register(px.Dispatch.ROWS, collect="list")
    def listed(self, x: list[int]) -> float:
        return float(len(x))

    @px.register(px.Dispatch.ROWS, collect="first")
    def first(self, x: list[int]) -> float:
        return float(len(x))

    @px.register(collect="join")
    def joined(self, x: int) -> list[int]:
        return [x]

    @px.register(collect="none")
    def silent(self, x: int) -> str:
        return str(x)

    @px.register(px.Dispatch.ROWS, collect=total)
    def summed(self, x: list[float]) -> float:
        return sum(x)

    @px.register(blocking=False)
    def later(self, x: int) -> str:
        return str(x)

    @px.register
    async def bare_async(self, x: int) -> str:
        return await self.rows_async([x])

    @px.register(px.Dispatch.ROWS)
    async def rows_async(self, x: list[int]) -> str:
        return str(x)

    @px.register
    def yields(self, x: int) -> Iterator[str]:
        yield str(x)

    @px.register
    async def yields_async(self, x: int) -> AsyncIterator[str]:
        yield str(x)

    @px.register(px.Dispatch.ROWS)
    def yields_rows(self, x: list[int]) -> Generator[str, None, None]:
        yield str(x)

    @px.register(px.Dispatch.RANK_ZERO)
    def yields_on_zero(self) -> Iterator[str]:
        yield ""

    @px.register(px.Dispatch.ROWS, collect="list")
    def yields_lists(self, x: list[int]) -> Iterator[str]:
        yield str(x)

    @px.register({"dispatch_fn": dealt, "collect_fn": total})
    def custom(self, x: int) -> float:
        return float(x)

    def unregistered(self, x: int) -> str:
        return str(x)


class Derived(Model):
    def one_to_all(self, x: int, *, scale: float = 1.0) -> str:
        return super().one_to_all(x, scale=scale)

    @px.register(px.Dispatch.ROWS)
    def rows(self, x: list[int]) -> list[str]:
        return super().rows(x)


def in_the_worker(model: Model) -> None:
    assert_type(model.one_to_all(1, scale=2.0), str)
    assert_type(model.rows([1]), list[str])
    assert_type(model.silent(1), str)


def of_each_mode(group: px.WorkerGroup) -> None:
    assert_type(group.method(Model.bare)(1), list[str])
    assert_type(group.method(Model.default)(1), list[str])
    assert_type(group.method(Model.one_to_all)(1, scale=2.0), list[str])
    assert_type(group.method(Model.all_to_all)([1]), list[str])
    assert_type(group.method(Model.rows)([1]), list[str])
    assert_type(group.method(Model.mesh_rows)([1]), list[str])
    assert_type(group.method(Model.rank_zero)(), str)
    assert_type(group.method(Model.metric)([1]), list[float])
    assert_type(group.method(Model.executed_on_zero)(), str)


def of_each_collect(group: px.WorkerGroup) -> None:
    assert_type(group.method(Model.listed)([1]), list[float])
    assert_type(group.method(Model.first)([1]), float)
    assert_type(group.method(Model.joined)(1), list[int])


def of_submitted_calls(group: px.WorkerGroup) -> None:
    assert_type(group.method(Model.one_to_all).submit(1), px.CallFuture[list[str]])
    assert_type(group.method(Model.rows).submit([1]), px.CallFuture[list[str]])
    assert_type(group.method(Model.rank_zero).options(timeout=1.0).submit().result(), str)


def of_coroutine_functions(group: px.WorkerGroup) -> None:
    assert_type(group.method(Model.bare_async)(1), list[str])
    assert_type(group.method(Model.rows_async)([1]), str)


def of_methods_that_yield(group: px.WorkerGroup) -> None:
    assert_type(group.method(Model.yields)(1), list[list[str]])
    assert_type(group.method(Model.yields_async).submit(1), px.CallFuture[list[list[str]]])
    assert_type(group.method(Model.yields_rows)([1]), list[str])
    assert_type(group.method(Model.yields_lists)([1]), list[list[str]])
    assert_type(group.method(Model.yields_on_zero)(), list[str])
    assert_type(list(group.method(Model.yields).stream(1)), list[tuple[int, str]])
    assert_type(list(group.method(Model.yields_async).stream(1, buffer=2)), list[tuple[int, str]])
    assert_type(list(group.method(Model.yields_rows).stream([1], by="rows")), list[tuple[int, Any]])
    assert_type(list(group.method(Model.yields_on_zero).stream()), list[str])
    assert_type(list(group[0].method(Model.yields).stream(1)), list[str])
    assert_type(group[0].method(Model.yields)(1), list[str])


async def of_streams_in_a_loop(group: px.WorkerGroup) -> None:
    async with group.method(Model.yields).options(timeout=1.0).stream(1) as items:
        assert_type([item async for item in items], list[tuple[int, str]])


def of_derived_classes(group: px.WorkerGroup) -> None:
    assert_type(group.method(Derived.bare)(1), list[str])
    assert_type(group.method(Derived.rows)([1]), list[str])
    assert_type(group.method(Derived.one_to_all)(1), Any)  # the override does not repeat its mode


def of_views(group: px.WorkerGroup) -> None:
    assert_type(group[0].method(Model.one_to_all)(1), str)
    assert_type(group[0:2].method(Model.one_to_all)(1), list[str])
    assert_type(group.any.method(Model.rows)([1]), list[str])
    assert_type(group.any.method(Model.bare).submit(1), px.CallFuture[str])
    assert_type(group.spawn()["actor"].method(Model.bare)(1), list[str])
    assert_type(group.spawn()["actor"][0].method(Model.bare)(1), str)
    assert_type([one.method(Model.bare)(1) for one in group], list[str])


def of_what_has_no_type_of_its_own(group: px.WorkerGroup) -> None:
    assert_type(group.method(Model.unregistered)(1), Any)
    assert_type(group.method(Model.custom)(1), Any)
    assert_type(group.method(Model.silent)(1), Any)
    assert_type(group.method(Model.summed)([1.0]), Any)
    assert_type(group.method(Model.later)(1), Any)
    assert_type(group.method("one_to_all")(1), Any)
    assert_type(group.one_to_all(1), Any)


def wrong_arguments_are_found(group: px.WorkerGroup) -> None:
    group.method(Model.one_to_all)("1")  # type: ignore[arg-type]
    group.method(Model.one_to_all)(1, 2.0)  # type: ignore[call-arg]
    group.method(Model.rows).submit(1)  # type: ignore[arg-type]
