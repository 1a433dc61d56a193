"""From what a message carries to the arguments that a worker method gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from phalanx.collect.join import gather, join_rows
from phalanx.collect.shares import only_settings, share_of
from phalanx.dispatch.split import pad_rows, padded_size, piece_of, slice_rows, take_rows
from phalanx.wire.codec import Policy, decode, decoding, nbytes_of
from phalanx.wire.decode_options import current_arrival, received
from phalanx.wire.messages import Assembled, Piece, RankCall, Reference, Stored, Whole
from phalanx.wire.outputs import PartInfo

Fetch = Callable[[Sequence[Any]], list[Any]]


class Arguments:
    """Resolves the tokens of one message; ``fetch`` gets the values behind the backend's references."""

    def __init__(self, refs: Sequence[Any], fetch: Fetch) -> None:
        self._refs = refs
        self._fetch = fetch

    def of(self, call: RankCall, device: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of a call, as private memory or as its method declares."""
        policy = Policy.READONLY if call.readonly else Policy.PRIVATE
        every = device is not None
        with decoding(policy, restore=self.restore, device=device, every_tensor=every):
            if call.body is not None:
                return decode(call.body)
            return self._fetch([self._refs[-1]])[0]

    def restore(self, token: Any) -> Any:
        """What stands behind one token."""
        match token:
            case Stored(index):
                return self._fetch([self._refs[index]])[0]
            case Reference(index):
                return self._refs[index]
            case Piece():
                return self._piece(token)
            case Whole():
                return self._whole(token)
            case Assembled():
                return self._assembled(token)
            case _:
                raise TypeError(f"unknown token {token!r}")

    @staticmethod
    def _parts_decoded(policy: Policy) -> AbstractContextManager[None]:
        """Parts of another call's result arrive as ``policy`` says, on the device of this call's other arguments."""
        arrival = current_arrival()
        return decoding(policy, device=arrival.device, every_tensor=arrival.every_tensor)

    def _assembled(self, value: Assembled) -> Any:
        """Parts that lie where others put them; what is joined is copied by that."""
        copied = value.joined and (len(value.parts) > 1 or value.pad_to_multiple is not None)
        parts = [self._stored_part(source, *cut, copied) for source, cut in value.parts]
        if not value.joined:
            parts = [
                part if cut[2] else join_rows([part])
                for part, (_, cut) in zip(parts, value.parts, strict=True)
            ]
            return [parts[i % len(parts)] for i in range(padded_size(len(parts), value.pad_to_multiple))]
        whole = all(cut[2] for _, cut in value.parts)
        joined = join_rows(parts) if copied or not whole else parts[0]
        return pad_rows(joined, value.pad_to_multiple) if value.pad_to_multiple else joined

    def _stored_part(self, source: int | bytes, start: int, stop: int, whole: bool, copied: bool) -> Any:
        policy = Policy.VIEW if copied or not whole else current_arrival().policy
        with self._parts_decoded(policy):
            part = decode(source) if isinstance(source, bytes) else self._fetch([self._refs[source]])[0]
        return part if whole else slice_rows(part, start, stop)  # a view, which is copied when it is joined

    def _whole(self, whole: Whole) -> Any:
        """A result as its caller would get it, or one of its even pieces."""
        # What is joined is copied by that; all else the worker gets as it lies.
        copied = whole.gather.how == "rows" or whole.rows is not None
        with self._parts_decoded(Policy.VIEW if copied else current_arrival().policy):
            outputs = self._fetch([self._refs[i] for i in whole.parts])
        result = gather(whole.gather, outputs)
        return result if whole.rows is None else join_rows([piece_of(result, *whole.rows)])

    def _piece(self, piece: Piece) -> Any:
        """Return rows of a result whose parts are stored on other ranks. Only overlapping parts are fetched."""
        infos: list[PartInfo] = self._fetch([self._refs[i] for i in piece.infos])
        if only_settings(infos):
            return self._fetch([self._refs[piece.parts[0]]])[0]
        share = share_of(piece.gather, infos, piece.index, piece.count, expected_rows=piece.expected_rows)
        in_place = (
            len(share.rows) == 1 and share.order is None and current_arrival().policy is Policy.READONLY
        )
        with self._parts_decoded(Policy.READONLY if in_place else Policy.VIEW):
            parts = self._fetch([self._refs[piece.parts[place]] for place, _ in share.rows])
        taken = [_taken(part, rows) for part, (_, rows) in zip(parts, share.rows, strict=True)]
        received.passed_over(sum(map(nbytes_of, parts)) - sum(map(nbytes_of, taken)))
        rows = taken[0] if in_place else join_rows(taken)
        if share.order is not None:
            rows = take_rows(rows, share.order)
        return pad_rows(rows, piece.pad_to_multiple) if piece.pad_to_multiple else rows


def _taken(part: Any, rows: Sequence[int]) -> Any:
    return slice_rows(part, rows.start, rows.stop) if isinstance(rows, range) else take_rows(part, rows)
