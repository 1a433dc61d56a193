"""Join the outputs of the ranks to the result of a call, by its ``GatherPlan``; and find the rows of a shard.

A shard has the rows that a rank would get of the joined result, without padding and in the caller's order, while the
outputs are stored on other ranks. A result without rows, or with settings that differ, is refused. Keys, dtypes and row
shapes are compared only between the outputs that contain rows of the shard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np

from phalanx.dispatch.batch_metadata import PerShard, differing, one_or_by_shard
from phalanx.dispatch.plan import GatherPlan
from phalanx.dispatch.pytree import Node, described, node_of
from phalanx.dispatch.shardable import RowOps, list_like, ops_for
from phalanx.dispatch.split import Shard, map_rows, row_ops
from phalanx.display.text_format import first_of
from phalanx.errors import DispatchError
from phalanx.wire.messages import PartInfo
from phalanx.wire.value import Value, is_tensor


def gather(plan: GatherPlan, outputs: Sequence[Any], group: Value = None) -> Value:
    """Return the result of a call.

    For ``collect="join"``, the outputs (possibly views of read-only memory) are joined as by :func:`join_rows`;
    otherwise outputs are returned unchanged. Padding is removed from each leaf that has exactly as many rows as the
    padded piece. If rows were sent in another order, they are returned in the caller's order: a leaf with k times the
    rows of every piece as runs of k, and a leaf with any other number of rows in the order of the pieces.

    Args:
        plan: the gather plan of the call.
        outputs: outputs by position in ``CallPlan.ranks``; outputs that ``plan.take`` leaves out may be None.
        group: first argument of a custom ``collect_fn``.

    Raises:
        DispatchError: if outputs cannot be joined; the message names the ranks that differ.
    """
    if plan.collect == "none":
        return None
    taken = [outputs[position] for position in plan.take]
    if plan.trim is not None:
        taken = [trimmed(value, *sizes) for value, sizes in zip(taken, plan.trim, strict=True)]
    if callable(plan.collect):
        return plan.collect(group, taken)
    if plan.collect == "first":
        return taken[0]
    if plan.collect == "list":
        return taken
    return _Join("rank", plan).whole(taken)


def join_rows(pieces: Sequence[Any]) -> Value:
    """Join the rows of ``pieces``, in order; the inverse of ``px.data.split_rows``.

    Structures (tuples, dicts, dataclasses) are joined leaf by leaf and must have the same type and keys. Leaves with
    rows are concatenated. Pieces without rows are ignored unless all are empty, so their dtype and row shape do not
    matter. A leaf without rows is returned once if it is an equal plain value in all pieces (number, string, None,
    path, enum member, 0-d tensor) or there is a single piece; otherwise as a ``px.data.PerShard``. The result shares no
    memory with the pieces, except in objects that are neither rows nor structures.

    Raises:
        DispatchError: if there are no pieces, or they cannot be joined; the message names the pieces that differ.
    """
    if not len(pieces):
        raise DispatchError("join_rows([]): expected at least one piece")
    return _Join("piece", GatherPlan("join", range(len(pieces)))).whole(list(pieces))


def places_of(plan: GatherPlan, counts: Sequence[int]) -> list[int] | None:
    """Return, for each row of a result, its index in the joined rows; None if they are in order already.

    ``counts`` are the numbers of rows of each output without padding.
    """
    order = plan.order
    if not order or plan.rows is None:
        return None
    times, rest = divmod(sum(counts), len(order))
    if rest or not times or list(counts) != [times * each for each in plan.rows]:
        return None
    where = [0] * len(order)
    for row, place in enumerate(order):
        where[place] = row
    if times == 1:
        return where
    return list(chain.from_iterable(range(row * times, (row + 1) * times) for row in where))


@dataclass(frozen=True)
class _Join:
    """Join of the values of several pieces. ``kind`` is the noun for a piece in error messages."""

    kind: str
    plan: GatherPlan

    def whole(self, values: list[Any]) -> Value:
        try:
            return self.join(values, "")
        except RecursionError:
            raise DispatchError(
                "results cannot be joined: one holds itself or is nested too deep. Return rows in a flat structure, or "
                'register the method with collect="list"'
            ) from None

    def join(self, values: list[Any], path: str) -> Value:
        nodes = [node_of(value) for value in values]
        first = nodes[0]
        if first is not None and all(_alike(first, node) for node in nodes):
            return self._children(first, [node for node in nodes if node is not None], path)
        if any(node is not None for node in nodes):
            raise self._differ(values, path)
        all_ops = list(map(row_ops, values))
        ops = all_ops[0]
        if any(other is not ops for other in all_ops):
            raise self._differ(values, path)
        return _owned(one_or_by_shard(values)) if ops is None else self._rows(ops, values, path)

    def _children(self, first: Node, nodes: list[Node], path: str) -> Value:
        children = [dict(zip(node.keys, node.values, strict=True)) for node in nodes]
        return first.rebuild(
            [self.join([each[key] for each in children], path + first.step.format(key)) for key in first.keys]
        )

    def _rows(self, ops: RowOps, values: list[Any], path: str) -> Value:
        counts = [ops.count(value) or 0 for value in values]
        filled = [value for value, count in zip(values, counts, strict=True) if count] or values[:1]
        if ops.kind == "list" or any(isinstance(v, np.ndarray) and v.dtype == object for v in filled):
            filled = [_owned(rows) for rows in filled]
        try:
            joined = ops.concat(filled)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise DispatchError(
                f"results cannot be joined{_at(path)}: {self._by_description(values)}: {error}. Return "
                "rows of one shape and dtype from every rank, or register the method with "
                'collect="list"'
            ) from error
        places = places_of(self.plan, counts)
        return joined if places is None else ops.take(joined, places)

    def _differ(self, values: list[Any], path: str) -> DispatchError:
        return DispatchError(
            f"results cannot be joined{_at(path)}: {self._by_description(values)}. Return the same structure "
            'from every rank, or register the method with collect="list"'
        )

    def _by_description(self, values: list[Any]) -> str:
        texts: dict[str, list[int]] = {}
        for number, value in zip(self.plan.ranks or self.plan.take, values, strict=True):
            text = "a list" if isinstance(value, list) else described(value)  # rows may differ in number
            texts.setdefault(text, []).append(number)
        return "; ".join(f"{self._named(numbers)} returned {text}" for text, numbers in texts.items())

    def _named(self, numbers: list[int]) -> str:
        return f"{self.kind}{'s' if len(numbers) > 1 else ''} {first_of(numbers)}"


def _alike(first: Node, other: Node | None) -> bool:
    return other is not None and first.kind is other.kind and set(first.keys) == set(other.keys)


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def trimmed(value: Value, given: int, real: int) -> Value:
    """Return ``value`` without padding, which is removed from each leaf with exactly ``given`` rows."""
    if given == real:
        return value
    return map_rows(value, lambda ops, leaf: ops.slice(leaf, 0, real) if ops.count(leaf) == given else leaf)


def _owned(value: Value) -> Value:
    """Return ``value`` with all tensors, arrays and other rows in it copied to memory of their own."""
    if is_tensor(value):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        holds_objects = value.dtype == object and value.ndim > 0
        return np.frompyfunc(_owned, 1, 1)(value) if holds_objects else value.copy()
    if isinstance(value, list):
        return list_like(value, [_owned(item) for item in value])
    if isinstance(value, PerShard):
        return PerShard(map(_owned, value))
    if (ops := ops_for(value)) is not None:
        has_rows = ops.count(value) is not None
        return ops.concat([value]) if has_rows else value.clone() if ops.kind == "TensorDict" else value
    node = node_of(value)
    return value if node is None else node.rebuild([_owned(child) for child in node.values])


@dataclass(frozen=True)
class RowShard:
    """Selection of rows of stored outputs.

    ``rows`` are pairs of the index of an output and its selected rows. There is at least a pair, possibly without rows.
    ``order`` has, for each row of the shard, its index in the selected rows; None if they are in order.
    """

    rows: Sequence[tuple[int, Sequence[int]]]
    order: Sequence[int] | None = None


def row_shard(gather: GatherPlan, infos: Sequence[PartInfo], shard: Shard) -> RowShard:
    """Return the rows of a shard of the result that ``gather`` joins.

    ``infos`` describe the joined outputs, in order.

    Raises:
        DispatchError: if the result has no rows, or another number of rows than the other arguments.
    """
    counts = [_rows_of(info, place) for place, info in enumerate(infos)]
    if gather.trim is not None:
        counts = [
            real if rows == given else rows for rows, (given, real) in zip(counts, gather.trim, strict=True)
        ]
    start, stop = shard.bounds(sum(counts))
    if start == stop:  # empty: from an output with rows, if any, which has the dtype and row shape
        return RowShard([(next((at for at, rows in enumerate(counts) if rows), 0), range(0))])
    places = places_of(gather, counts)
    if places is not None:
        return _picked(counts, places[start:stop])
    return RowShard(list(rows_between(counts, start, stop)))


def only_settings(infos: Sequence[PartInfo]) -> bool:
    """Return whether the outputs have only settings and no rows, so that every rank gets the complete value.

    Raises:
        DispatchError: if a setting differs between the outputs.
    """
    paths = differing([info.settings for info in infos])
    if paths:
        shown = first_of([path or "a value" for path in paths])
        raise DispatchError(
            f"a future was passed where rows are split, but {shown} of its result differs between the ranks that "
            "returned it, or is no plain value (a px.data.PerShard in its .result()), and has no rows. Put one value "
            "in its place in the .result(), or return the same from every rank"
        )
    return all(info.rows is None for info in infos)


def rows_between(counts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, range]]:
    """Yield the index and the rows of each part with rows in [start, stop), given the number of rows of each part."""
    begins = list(accumulate(counts, initial=0))
    for index, (begin, count) in enumerate(zip(begins, counts, strict=False)):
        rows = range(max(start - begin, 0), min(stop - begin, count))
        if rows:
            yield index, rows


def _picked(counts: Sequence[int], wanted: Sequence[int]) -> RowShard:
    """Return the shard with the ``wanted`` rows of the joined outputs, in any order."""
    begins = list(accumulate(counts, initial=0))
    rows: dict[int, list[int]] = {}
    for row in sorted(wanted):
        index = bisect_right(begins, row) - 1
        rows.setdefault(index, []).append(row - begins[index])
    place = {row: place for place, row in enumerate(sorted(wanted))}
    return RowShard(list(rows.items()), [place[row] for row in wanted])


def _rows_of(info: PartInfo, place: int) -> int:
    if info.rows is None or info.rows < 0:
        raise DispatchError(
            f"a future was passed where rows are split, but output {place} of its call has no rows, or leaves with "
            "different numbers of them; pass future.result() to give the same value to every rank"
        )
    return info.rows
