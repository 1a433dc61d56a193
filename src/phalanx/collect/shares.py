"""The share of a rank in a result whose outputs are stored on other ranks: which rows of which outputs. Pure.

It has the rows that the rank would get of the joined result, without padding and in the caller's order. A result that
cannot be joined is refused here with the same errors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from phalanx.collect.join import places_of
from phalanx.dispatch.batch_metadata import differing
from phalanx.dispatch.plan import GatherPlan
from phalanx.dispatch.split import check_rows, piece_bounds
from phalanx.errors import DispatchError
from phalanx.wire.messages import PartInfo

_SHOWN = 8


@dataclass(frozen=True)
class Share:
    """Rows of stored outputs.

    ``rows`` are pairs of an output's index and its rows. There is always a pair, possibly with no rows. ``order`` is,
    for each row of the share, its place among these rows; None if they are in order.
    """

    rows: Sequence[tuple[int, Sequence[int]]]
    order: Sequence[int] | None = None


def share_of(
    gather: GatherPlan,
    infos: Sequence[PartInfo],
    index: int,
    count: int,
    *,
    expected_rows: int | None = None,
) -> Share:
    """Piece ``index`` of ``count`` even pieces of the result that ``gather`` makes of the outputs.

    ``infos`` describe the outputs that are joined, in order.

    Raises:
        DispatchError: the result has no rows, or others than ``expected_rows``, or a setting that the outputs do not
            agree on.
    """
    _check_settings(infos)
    counts = [_rows_of(info, place) for place, info in enumerate(infos)]
    if gather.trim is not None:
        counts = [
            real if rows == given else rows for rows, (given, real) in zip(counts, gather.trim, strict=True)
        ]
    total = sum(counts)
    check_rows(total, expected_rows)
    start, stop = piece_bounds(total, count, index)
    if start == stop:  # of an output that has rows, if any: their dtype and shape are those of the result
        return Share([(next((at for at, rows in enumerate(counts) if rows), 0), range(0))])
    places = places_of(gather.order, gather.rows, counts)
    if places is not None:
        return _picked(counts, places[start:stop])
    return Share(list(_between(counts, start, stop)))


def only_settings(infos: Sequence[PartInfo]) -> bool:
    """Return whether no output has rows, and all have the same settings: then every rank gets the complete value.

    Raises:
        DispatchError: a setting differs between the outputs.
    """
    _check_settings(infos)
    return all(info.rows is None and info.settings for info in infos)


def _between(counts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, range]]:
    """Yield the outputs with rows in [start, stop)."""
    begins = list(accumulate(counts, initial=0))
    for index, (begin, count) in enumerate(zip(begins, counts, strict=False)):
        rows = range(max(start - begin, 0), min(stop - begin, count))
        if rows:
            yield index, rows


def _picked(counts: Sequence[int], wanted: Sequence[int]) -> Share:
    """The wanted rows of all, which are not in order."""
    begins = list(accumulate(counts, initial=0))
    rows: dict[int, list[int]] = {}
    for row in sorted(wanted):
        index = bisect_right(begins, row) - 1
        rows.setdefault(index, []).append(row - begins[index])
    place = {row: place for place, row in enumerate(sorted(wanted))}
    return Share(list(rows.items()), [place[row] for row in wanted])


def _check_settings(infos: Sequence[PartInfo]) -> None:
    paths = differing([info.settings for info in infos])
    if paths:
        shown = ", ".join(path or "it" for path in paths[:_SHOWN])
        raise DispatchError(
            f"a future was passed where rows are split, but {shown} of its result differs between the ranks that "
            "returned it, or is no plain value (a px.data.PerShard in its .result()), and has no rows. "
            "Put one value in its "
            "place in the .result(), or return the same from every rank"
        )


def _rows_of(info: PartInfo, place: int) -> int:
    if info.rows is None:
        raise DispatchError(
            f"a future was passed where rows are split, but output {place} of its call has no rows, or leaves with "
            "different numbers of them; pass future.result() to give the same value to every rank"
        )
    return info.rows
