"""Cutting rows into pieces: sizes, padding, and the pieces of a value.

The words: a *leaf* is a value that is not taken apart (``structure``); it has rows (``shardable``) or is a setting
(``settings``). A *piece* is the part of a value for a rank, or for all ranks of a dp coordinate; a *cut* says which
rows each piece gets. An *output* is the result of a rank; the outputs that are kept are the pieces of the result
(``collect``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from phalanx.dispatch.batch_metadata import PerShard, Settings, digest, is_table_like
from phalanx.dispatch.plan import FuturePiece
from phalanx.dispatch.pytree import Build, Leaf, flatten, is_future, unwrap
from phalanx.dispatch.shardable import RowOps, ops_for
from phalanx.errors import DispatchError, PhalanxError

_SHOWN = 12


def even_sizes(rows: int, parts: int) -> list[int]:
    """Return the row counts of ``parts`` consecutive pieces: they differ by at most 1, the larger come first."""
    size, larger = divmod(rows, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def padded_size(rows: int, multiple: int | None) -> int:
    """``rows`` rounded up to a multiple; no rows stay no rows, as there is none that could be repeated."""
    return rows if multiple is None else -(-rows // multiple) * multiple


@dataclass(frozen=True)
class Cut:
    """Which rows each piece gets.

    ``sizes`` are the real rows by piece; ``indices`` the rows of each piece where they are not consecutive.
    Each piece is then padded up to a multiple of ``pad_to_multiple`` by repeating its own rows from its
    first; a piece of no rows stays empty.
    """

    sizes: Sequence[int]
    indices: Sequence[Sequence[int]] | None = None
    pad_to_multiple: int | None = None

    @property
    def given(self) -> list[int]:
        """Rows by piece, padding included."""
        return [padded_size(size, self.pad_to_multiple) for size in self.sizes]

    @property
    def order(self) -> list[int] | None:
        """The caller's row for each row of the joined pieces; None where it is the caller's order."""
        return None if self.indices is None else list(chain.from_iterable(self.indices))

    def pieces(self, value: Any, ops: RowOps) -> list[Any]:
        """Return the pieces of a leaf; views if the type allows them and nothing is padded."""
        if self.indices is None:
            pieces = ops.split(value, self.sizes)
        else:
            pieces = [ops.take(value, rows) for rows in self.indices]
        if self.pad_to_multiple is None:
            return pieces
        return [
            _padded(piece, ops, *sizes) for piece, *sizes in zip(pieces, self.sizes, self.given, strict=True)
        ]


def pad_rows(value: Any, multiple: int) -> Any:
    """``value`` with its rows padded up to a multiple, its own rows repeated from the first; see ``Cut``.

    Raises:
        DispatchError: its leaves have different numbers of rows.
    """
    rows = count_rows(value)
    if not rows or rows % multiple == 0:
        return value
    wanted = padded_size(rows, multiple)
    return map_rows(value, lambda ops, leaf: _padded(leaf, ops, rows, wanted))


def _padded(piece: Any, ops: RowOps, rows: int, wanted: int) -> Any:
    return piece if rows == wanted else ops.take(piece, [i % rows for i in range(wanted)])


def row_ops(leaf: Leaf) -> RowOps | None:
    """The row operations of a leaf that has rows, or None."""
    ops = ops_for(leaf.value)
    return ops if ops is not None and ops.count(leaf.value) is not None else None


def refuse_unclear_rows(leaves: Iterable[Leaf], where: str) -> None:
    """Check that the rows of every leaf are known, so that it can be split.

    Raises:
        DispatchError: a leaf is a ``PerShard`` of an earlier call, or a table of a type whose rows are not known.
    """
    for leaf in leaves:
        if isinstance(leaf.value, PerShard):
            raise DispatchError(
                f"{where}: {leaf.path} is {leaf.value!r:.120}, on which the pieces of an earlier call did not agree; "
                f"it has no rows, and which of its {len(leaf.value)} values is meant is not known. Put one value in "
                "its place, such as its first or its mean, or px.replicate(...) to give all of them to every rank"
            )
        if ops_for(leaf.value) is None and is_table_like(leaf.value):
            kind = f"{type(leaf.value).__module__}.{type(leaf.value).__qualname__}"
            raise DispatchError(
                f"{where}: {leaf.path} is a {kind}, whose rows are not known, so it cannot be split with the others; "
                "teach them with px.data.register_row_type, or wrap it in px.replicate(...) to give it "
                "whole to every rank"
            )


def rows_of(leaves: Iterable[Leaf], where: str) -> int | None:
    """The row count that all leaves with rows agree on; None where no leaf has rows.

    Raises:
        DispatchError: they differ; the message, which begins with ``where``, names each and its count.
    """
    # Pairs, as two leaves may have the same path: keys of a dict whose text is equal.
    counts = [(leaf.path, ops.count(leaf.value)) for leaf in leaves if (ops := row_ops(leaf)) is not None]
    if len({count for _, count in counts}) > 1:
        shown = [f"{path} has {count}" for path, count in counts]
        more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
        raise DispatchError(
            f"{where}: the numbers of rows differ: {', '.join([*shown[:_SHOWN], *more])}. Everything that is "
            "split must have the same number of rows; wrap what ranks shall get whole in px.replicate(...)"
        )
    return counts[0][1] if counts else None


def count_rows(value: Any) -> int | None:
    """The number of rows of ``value``, whose leaves must agree; None where nothing in it has rows.

    Raises:
        DispatchError: leaves have different numbers of rows, or one is a future.
    """
    leaves, _ = _without_futures(value, "count_rows")
    return rows_of(leaves, "count_rows")


def _without_futures(value: Any, where: str) -> tuple[list[Leaf], Callable[[Iterator[Any]], Any]]:
    """Take a value apart, none of whose leaves may be a future."""
    leaves, build = flatten(value, "value")
    for leaf in leaves:
        if is_future(leaf.value):
            raise DispatchError(f"{where}: {leaf.path} is {leaf.value!r}; pass its .result() instead")
    return leaves, build


def settings_of(leaves: Iterable[Leaf]) -> Settings:
    """Return the paths and digests of the leaves without rows, to compare them without their values."""
    return tuple((leaf.path, digest(leaf.value)) for leaf in leaves if row_ops(leaf) is None)


def split_rows(value: Any, parts: int) -> list[Any]:
    """``value`` cut into ``parts`` pieces along its rows, in order; structures are cut leaf by leaf.

    Sizes differ by at most 1, the larger first, and may be zero. Leaves without rows, and values in ``px.replicate``,
    are in every piece. Pieces of tensors and arrays are views.

    Raises:
        DispatchError: leaves have different numbers of rows, a leaf is a future, a ``px.data.PerShard`` or a table of
            an unknown type, or ``parts`` is not a whole number from 1.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise DispatchError(
            f"split_rows(..., {parts!r}): expected the number of pieces, a whole number from 1"
        )
    leaves, build = _without_futures(value, "split_rows")
    refuse_unclear_rows(leaves, "split_rows")
    return split_leaves(leaves, build, Cut(even_sizes(rows_of(leaves, "split_rows") or 0, parts)))


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Rows ``start`` to ``stop`` (not included) of ``value``; views of tensors and arrays."""
    return map_rows(value, lambda ops, leaf: ops.slice(leaf, start, stop))


def map_rows(value: Any, change: Callable[[RowOps, Any], Any]) -> Any:
    """Return ``value`` with each leaf that has rows replaced by ``change`` of its operations and itself."""
    leaves, build = flatten(value, "value")
    return build(change(ops, leaf.value) if (ops := row_ops(leaf)) else unwrap(leaf.value) for leaf in leaves)


def piece_of(
    value: Any, index: int, count: int, pad_to_multiple: int | None = None, expected_rows: int | None = None
) -> Any:
    """Piece ``index`` of ``count`` even pieces of a result that is here; without rows, the result itself.

    Raises:
        DispatchError: it has other than ``expected_rows`` rows, or cannot be split.
    """
    where = "a future was passed where rows are split"
    leaves, _ = flatten(value, "its result")
    refuse_unclear_rows(leaves, where)
    rows = rows_of(leaves, where)
    if rows is None:
        return value
    check_rows(rows, expected_rows)
    piece = slice_rows(value, *piece_bounds(rows, count, index))
    return pad_rows(piece, pad_to_multiple) if pad_to_multiple else piece


def check_rows(rows: int, expected: int | None, what: str = "a future") -> None:
    """Check that the rows of a future, or of ``what``, are as many as those of the other arguments, if they have any.

    Raises:
        DispatchError: the numbers of rows differ.
    """
    if expected not in (None, rows):
        raise DispatchError(
            f"the arguments of one call disagree in rows: {what} brought {rows} rows, the other arguments have "
            f"{expected}; pass the same number of rows in each, or px.replicate(x)"
        )


def take_rows(value: Any, indices: Sequence[int]) -> Any:
    """The rows of ``value`` at ``indices``, in that order."""
    return map_rows(value, lambda ops, leaf: ops.take(leaf, indices))


def split_leaves(
    leaves: Sequence[Leaf], build: Callable[..., Any], cut: Cut, expected_rows: int | None = None
) -> list[Any]:
    """Split a value that ``flatten`` took apart into pieces; its futures become ``FuturePiece``s."""
    columns = [_column(leaf, cut, expected_rows) for leaf in leaves]
    return build.every(columns, len(cut.sizes)) if isinstance(build, Build) else columns[0]


def _column(leaf: Leaf, cut: Cut, expected_rows: int | None) -> list[Any]:
    parts = len(cut.sizes)
    if is_future(leaf.value):
        return [
            FuturePiece(leaf.value, index, parts, cut.pad_to_multiple, expected_rows)
            for index in range(parts)
        ]
    ops = row_ops(leaf)
    if ops is None:
        return [unwrap(leaf.value)] * parts
    try:
        return cut.pieces(leaf.value, ops)
    except PhalanxError:
        raise
    except Exception as error:  # such as a layout of tensors that has no rows of its own
        layout = f" of layout {leaf.value.layout}" if hasattr(leaf.value, "layout") else ""
        raise DispatchError(
            f"{leaf.path}, a {type(leaf.value).__name__}{layout}, cannot be split by rows: {type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}. Give it in a form that can be cut along dim 0, or "
            "px.replicate(...) to give it whole to every rank"
        ) from error


def piece_bounds(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First row and row after the last of piece ``index`` when ``rows`` are split evenly over ``parts``."""
    size, larger = divmod(rows, parts)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)
