"""From what a message carries to the arguments that a worker method gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from phalanx.collect.join import gather, join_rows, with_rests
from phalanx.dispatch.settings import differing
from phalanx.dispatch.split import pad_rows, piece_bounds, slice_rows
from phalanx.errors import DispatchError
from phalanx.wire.arrival import current_arrival, received
from phalanx.wire.codec import Policy, decode, decoding, nbytes_of
from phalanx.wire.messages import PartInfo, Piece, RankCall, Reference, Stored, Whole

Fetch = Callable[[Sequence[Any]], list[Any]]


class Arguments:
    """Resolves the tokens of one message; ``fetch`` gets the values behind the transport's references."""

    def __init__(self, refs: Sequence[Any], fetch: Fetch) -> None:
        self._refs = refs
        self._fetch = fetch

    def of(
        self, call: RankCall, device: Any = None, shared: list[memoryview] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of a call, as private memory or as its method declares.

        ``shared`` is given the memory of those that are only to be read.
        """
        policy = Policy.READONLY if call.readonly else Policy.PRIVATE
        every = device is not None
        with decoding(policy, restore=self.restore, device=device, every_tensor=every, shared=shared):
            if isinstance(call.body, bytes):
                return decode(call.body)
            stored = self._fetch([self._refs[-1]])[0]
            return stored if call.body is None else decode(stored.values[call.body])

    def restore(self, token: Any) -> Any:
        """What stands behind one token."""
        match token:
            case Stored(index):
                return self._fetch([self._refs[index]])[0]
            case Reference(index):
                return self._refs[index]
            case Piece():
                return self._piece(token)
            case Whole(parts, rests, plan):
                with self._parts_decoded(Policy.VIEW):
                    outputs = self._fetch([self._refs[i] for i in parts])
                    seconds = self._fetch([self._refs[i] for i in rests]) if rests else ()
                return gather(plan, with_rests(outputs, seconds))
            case _:
                raise TypeError(f"unknown token {token!r}")

    @staticmethod
    def _parts_decoded(policy: Policy) -> AbstractContextManager[None]:
        """Parts of another call's result arrive as ``policy`` says, on the device of this call's other arguments."""
        arrival = current_arrival()
        return decoding(
            policy, device=arrival.device, every_tensor=arrival.every_tensor, shared=arrival.shared
        )

    def _piece(self, piece: Piece) -> Any:
        """Rows of a result whose parts lie on other ranks: only the overlapping parts, or halves, are fetched."""
        infos: list[PartInfo] = self._fetch([self._refs[i] for i in piece.infos])
        _check_settings(infos)
        if all(
            info.rows is None and info.settings for info in infos
        ):  # no rows at all, and the same from all
            return self._fetch([self._refs[piece.parts[0]]])[0]
        counts = [_rows_of(info, rank) for rank, info in enumerate(infos)]
        refs = piece.parts
        if piece.rests:
            counts = [n for info, rows in zip(infos, counts, strict=True) for n in _halves(info, rows)]
            refs = [i for pair in zip(piece.parts, piece.rests, strict=True) for i in pair]
        total = sum(counts)
        if piece.expected_rows is not None and piece.expected_rows != total:
            raise DispatchError(
                f"the arguments of one call disagree in rows: a future brought {total} rows, the other "
                f"arguments have {piece.expected_rows}; pass the same number of rows in each, or px.replicate(x)"
            )
        start, stop = piece_bounds(total, piece.count, piece.index)
        wanted = list(_overlaps(counts, start, stop))
        in_place = len(wanted) == 1 and current_arrival().policy is Policy.READONLY
        with self._parts_decoded(Policy.READONLY if in_place else Policy.VIEW):
            parts = self._fetch([self._refs[refs[part]] for part, _, _ in wanted])
        taken = [slice_rows(part, a, b) for part, (_, a, b) in zip(parts, wanted, strict=True)]
        if not piece.rests:  # all parts lie in the store of this node: rows that are not read are not moved
            received.passed_over(sum(map(nbytes_of, parts)) - sum(map(nbytes_of, taken)))
        rows = taken[0] if in_place else join_rows(taken)
        return pad_rows(rows, piece.pad_to_multiple) if piece.pad_to_multiple else rows


def _check_settings(infos: Sequence[PartInfo]) -> None:
    """As a result that came through the driver would be refused where it holds a ``ByPiece``."""
    paths = differing([info.settings for info in infos])
    if paths:
        raise DispatchError(
            f"a future was passed where rows are split, but {', '.join(path or 'it' for path in paths[:8])} of its "
            "result differs between the ranks that returned it, or is no plain value (a px.ByPiece in its .result()), "
            "and has no rows. Put one value in its place in the .result(), or return the same from every rank"
        )


def _halves(info: PartInfo, rows: int) -> tuple[int, int]:
    """Rows of the first and of the second half of a part."""
    first = info.first_rows or 0
    return first, rows - first


def _rows_of(info: PartInfo, source: int) -> int:
    if info.rows is None:
        raise DispatchError(
            f"a future was passed where rows are split, but the output of rank {source} has no rows (no tensor, "
            "array, list or table in it); pass future.result() to give the same value to every rank"
        )
    return info.rows


def _overlaps(counts: Sequence[int], start: int, stop: int) -> Sequence[tuple[int, int, int]]:
    """(index, first, last) rows of each of them that lie in [start, stop); one empty part when there are none."""
    found: list[tuple[int, int, int]] = []
    offset = 0
    for source, count in enumerate(counts):
        first, last = max(start - offset, 0), min(stop - offset, count)
        if first < last:
            found.append((source, first, last))
        offset += count
    return found or [(0, 0, 0)]
