"""Split rows into shards: sizes, padding, and the shards of a value.

Terms: a *leaf* is a value that is not a structure (``pytree``). It has rows (``shardable``) or is a setting
(``batch_metadata``). A *shard* is the part of a value for a rank, or for all ranks of a dp coordinate; a *cut* defines
the rows of each shard. An *output* is the return value of a rank; the collected outputs are the shards of the result
(``collect``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from phalanx.dispatch.batch_metadata import PerShard, Settings, digest, is_table_like
from phalanx.dispatch.pytree import Build, Builder, Flat, Leaf, flatten, is_future, unwrap
from phalanx.dispatch.shardable import RowOps, ops_for
from phalanx.display.text_format import first_of
from phalanx.errors import DispatchError, PhalanxError
from phalanx.wire.value import checked_number

_SHOWN = 12


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return the row counts of ``parts`` consecutive shards, which differ by at most 1, larger counts first."""
    size, larger = divmod(rows, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def padded_size(rows: int, multiple: int | None) -> int:
    """Return ``rows`` rounded up to a multiple (None: unchanged). 0 stays 0, since there is no row to repeat."""
    return rows if multiple is None else -(-rows // multiple) * multiple


@dataclass(frozen=True)
class Cut:
    """The rows of each shard.

    ``sizes`` are the numbers of real rows by shard; ``indices`` the rows of each shard, None if they are consecutive.
    Each shard is padded up to a multiple of ``pad_to_multiple`` by repeating its own rows from the first on. A shard
    without rows stays empty.
    """

    sizes: Sequence[int]
    indices: Sequence[Sequence[int]] | None = None
    pad_to_multiple: int | None = None

    @property
    def given(self) -> list[int]:
        """Number of rows by shard, including padding."""
        return [padded_size(size, self.pad_to_multiple) for size in self.sizes]

    @property
    def order(self) -> list[int] | None:
        """Index of the caller's row for each row of the joined shards; None if the order is unchanged."""
        return None if self.indices is None else list(chain.from_iterable(self.indices))

    def shards(self, value: Any, ops: RowOps) -> list[Any]:
        """Return the shards of a leaf: views if the type supports them, unless rows are reordered or padded."""
        if self.indices is None:
            shards = ops.split(value, self.sizes)
        else:
            shards = [ops.take(value, rows) for rows in self.indices]
        if self.pad_to_multiple is None:
            return shards
        return [
            _padded(shard, ops, *sizes) for shard, *sizes in zip(shards, self.sizes, self.given, strict=True)
        ]


def pad_rows(value: Any, multiple: int | None) -> Any:
    """Return ``value`` with its rows padded up to a multiple (None: as they are), by repeating rows from the first on.

    Raises:
        DispatchError: if its leaves have different numbers of rows.
    """
    rows = None if multiple is None else count_rows(value)
    wanted = padded_size(rows or 0, multiple)
    if not rows or rows == wanted:
        return value
    return map_rows(value, lambda ops, leaf: _padded(leaf, ops, rows, wanted))


def _padded(shard: Any, ops: RowOps, rows: int, wanted: int) -> Any:
    return shard if rows == wanted else ops.take(shard, [i % rows for i in range(wanted)])


def row_ops(value: Any) -> RowOps | None:
    """Return the row operations of the value of a leaf, or None if it has no rows."""
    ops = ops_for(value)
    return ops if ops is not None and ops.count(value) is not None else None


def refuse_unclear_rows(leaves: Iterable[Leaf], where: str) -> None:
    """Check that every leaf can be split or is clearly without rows.

    Raises:
        DispatchError: if a leaf is a ``PerShard`` of an earlier call, or a table of an unknown type.
    """
    for leaf in leaves:
        if isinstance(leaf.value, PerShard):
            raise DispatchError(
                f"{where}: {leaf.path} is {leaf.value!r:.120}, on which the shards of an earlier call did not agree; "
                f"it has no rows, and which of its {len(leaf.value)} values is meant is not known. Put one value in "
                "its place, such as its first or its mean, or px.replicate(...) to give all of them to every rank"
            )
        if ops_for(leaf.value) is None and is_table_like(leaf.value):
            kind = f"{type(leaf.value).__module__}.{type(leaf.value).__qualname__}"
            raise DispatchError(
                f"{where}: {leaf.path} is a {kind}, whose rows are not known, so it cannot be split with the others; "
                "register the type with px.data.register_row_type, or wrap it in px.replicate(...) to pass it in full "
                "to every rank"
            )


def rows_of(leaves: Iterable[Leaf], where: str) -> int | None:
    """Return the number of rows that all leaves with rows have; None if no leaf has rows.

    Raises:
        DispatchError: if the numbers differ. The message begins with ``where`` and lists the leaves and numbers.
    """
    # Pairs, not a dict: two leaves may have the same path, if keys of a dict have the same repr.
    counts = [
        (leaf.path, ops.count(leaf.value)) for leaf in leaves if (ops := row_ops(leaf.value)) is not None
    ]
    if len({count for _, count in counts}) > 1:
        shown = first_of([f"{path} has {count}" for path, count in counts], _SHOWN)
        raise DispatchError(
            f"{where}: the numbers of rows differ: {shown}. Everything that is split must have the same number of "
            "rows; wrap values that all ranks get in full in px.replicate(...)"
        )
    return counts[0][1] if counts else None


def count_rows(value: Any) -> int | None:
    """Return the number of rows of ``value``, or None if no leaf in it has rows.

    Raises:
        DispatchError: if leaves have different numbers of rows, or a leaf is a future.
    """
    leaves, _ = _without_futures(value, "count_rows")
    return rows_of(leaves, "count_rows")


def _without_futures(value: Any, where: str) -> Flat:
    """Flatten a value. Raise DispatchError if a leaf is a future."""
    leaves, build = flatten(value, "value")
    for leaf in leaves:
        if is_future(leaf.value):
            raise DispatchError(f"{where}: {leaf.path} is {leaf.value!r}; pass its .result() instead")
    return leaves, build


def settings_of(leaves: Iterable[Leaf]) -> Settings:
    """Return the paths and digests of the leaves without rows, to compare leaves without their values."""
    return tuple((leaf.path, digest(leaf.value)) for leaf in leaves if row_ops(leaf.value) is None)


def split_rows(value: Any, parts: int) -> list[Any]:
    """Split ``value`` into ``parts`` shards along its rows, in order. Structures are split leaf by leaf.

    The numbers of rows differ by at most 1, larger shards first, and may be 0. Leaves without rows, and values in
    ``px.replicate``, are in every shard. Shards of tensors and arrays are views.

    Raises:
        DispatchError: if leaves have different numbers of rows; if a leaf is a future, a ``px.data.PerShard`` or a
            table of an unknown type; or if ``parts`` is not an integer of at least 1.
    """
    parts = checked_number("split_rows: parts", parts, 1, error=DispatchError)
    leaves, build = _without_futures(value, "split_rows")
    refuse_unclear_rows(leaves, "split_rows")
    return split_leaves(leaves, build, Cut(even_sizes(rows_of(leaves, "split_rows") or 0, parts)))


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Return rows ``start`` to ``stop`` (exclusive) of ``value``; views of tensors and arrays."""
    return map_rows(value, lambda ops, leaf: ops.slice(leaf, start, stop))


def map_rows(value: Any, change: Callable[[RowOps, Any], Any]) -> Any:
    """Return ``value`` with ``change(row operations, leaf)`` in place of each leaf that has rows."""
    leaves, build = flatten(value, "value")
    return build(
        change(ops, leaf.value) if (ops := row_ops(leaf.value)) else unwrap(leaf.value) for leaf in leaves
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard ``index`` of ``count`` even shards of rows, padded up to a multiple of ``pad_to_multiple``.

    ``expected_rows`` is the number of rows of the other arguments; None: they have no rows.
    """

    index: int
    count: int
    pad_to_multiple: int | None = None
    expected_rows: int | None = None

    def bounds(self, rows: int, what: str = "a future") -> tuple[int, int]:
        """Return the first row of the shard, and the row after its last, of the ``rows`` rows of ``what``.

        Raises:
            DispatchError: if ``rows`` differs from the number of rows of the other arguments.
        """
        check_rows(rows, self.expected_rows, what)
        size, larger = divmod(rows, self.count)
        start = self.index * size + min(self.index, larger)
        return start, start + size + (self.index < larger)


@dataclass(frozen=True)
class FutureShard:
    """A shard of a future's result. The rank that gets it fetches only the stored parts that overlap the shard."""

    future: Any
    shard: Shard


def shard_of(value: Any, shard: Shard) -> Any:
    """Return a shard of a fetched result; without rows, the result itself.

    Raises:
        DispatchError: if the result has another number of rows than the other arguments, or cannot be split.
    """
    where = "a future was passed where rows are split"
    leaves, _ = flatten(value, "its result")
    refuse_unclear_rows(leaves, where)
    rows = rows_of(leaves, where)
    if rows is None:
        return value
    return pad_rows(slice_rows(value, *shard.bounds(rows)), shard.pad_to_multiple)


def check_rows(rows: int, expected: int | None, what: str = "a future") -> None:
    """Check the number of rows of a future (or of ``what``) against the other arguments (None: they have no rows).

    Raises:
        DispatchError: if the numbers of rows differ.
    """
    if expected not in (None, rows):
        raise DispatchError(
            f"the arguments of one call disagree in rows: {what} has {rows} rows, the other arguments have "
            f"{expected}; pass the same number of rows in each, or px.replicate(x)"
        )


def take_rows(value: Any, indices: Sequence[int]) -> Any:
    """Return the rows of ``value`` at ``indices``, in that order."""
    return map_rows(value, lambda ops, leaf: ops.take(leaf, indices))


def split_leaves(
    leaves: Sequence[Leaf], build: Builder, cut: Cut, expected_rows: int | None = None
) -> list[Any]:
    """Return the shards of a flattened value, with a ``FutureShard`` in place of each future."""
    columns = [_column(leaf, cut, expected_rows) for leaf in leaves]
    return build.every(columns, len(cut.sizes)) if isinstance(build, Build) else columns[0]


def _column(leaf: Leaf, cut: Cut, expected_rows: int | None) -> list[Any]:
    parts = len(cut.sizes)
    if is_future(leaf.value):
        return [
            FutureShard(leaf.value, Shard(index, parts, cut.pad_to_multiple, expected_rows))
            for index in range(parts)
        ]
    ops = row_ops(leaf.value)
    if ops is None:
        return [unwrap(leaf.value)] * parts
    try:
        return cut.shards(leaf.value, ops)
    except PhalanxError:
        raise
    except Exception as error:  # for example a tensor layout that cannot be sliced
        layout = f" of layout {leaf.value.layout}" if hasattr(leaf.value, "layout") else ""
        raise DispatchError(
            f"{leaf.path}, a {type(leaf.value).__name__}{layout}, cannot be split by rows: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}. Give it in a form that can be cut along dim 0, or "
            "px.replicate(...) to give it whole to every rank"
        ) from error
