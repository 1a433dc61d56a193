"""Values as they are sent: arguments from a message and its references, joined parts of results, and outputs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from phalanx.collect.join import gather, join_rows, only_settings, row_shard
from phalanx.dispatch.pytree import flatten
from phalanx.dispatch.split import (
    Shard,
    check_rows,
    count_rows,
    pad_rows,
    padded_size,
    rows_of,
    settings_of,
    shard_of,
    slice_rows,
    take_rows,
)
from phalanx.errors import DispatchError
from phalanx.wire.codec import ATOMS, PLAIN_HEAD, decode, decoding, encode
from phalanx.wire.messages import (
    JoinedPlaceholder,
    PartInfo,
    RefPlaceholder,
    ResultOf,
    StoredPlaceholder,
)
from phalanx.wire.unpack import current_arrival, received

Fetch = Callable[[Sequence[Any]], list[Any]]


def decoded(
    body: bytes | None, refs: Sequence[Any], fetch: Fetch, *, readonly: bool = False, device: Any = None
) -> Any:
    """Return the value of the body of a message, as private memory unless ``readonly``.

    Args:
        body: the encoded value; None: the last reference holds it.
        refs: the backend's references that the body indexes.
        fetch: returns the values of references.
        device: where tensors go; None: the CPU.
    """
    # most calls: no tensors with bytes, and no placeholders
    if body is not None and body[:1] == PLAIN_HEAD and device is None:
        return pickle.loads(body)
    with decoding(readonly=readonly, restore=_Placeholders(refs, fetch).restore, device=device):
        return fetch([refs[-1]])[0] if body is None else decode(body)


class _Placeholders:
    """Restores the values of a message's placeholders; ``fetch`` returns the values of the backend's references."""

    def __init__(self, refs: Sequence[Any], fetch: Fetch) -> None:
        self._refs = refs
        self._fetch = fetch
        self._rows: int | None = None  # rows that this rank got of each future so far

    def restore(self, token: Any) -> Any:
        """Return the value of a placeholder."""
        match token:
            case StoredPlaceholder(index):
                return self._values([index])[0]
            case RefPlaceholder(index):
                return self._refs[index]
            case ResultOf():
                return self._shard(token, token.shard) if token.infos else self._result(token)
            case JoinedPlaceholder():
                return joined_parts(token.parts, token.joined, self._values, token.pad_to_multiple)
            case _:
                raise TypeError(f"unknown token {token!r}")

    def _values(self, indices: Sequence[int]) -> list[Any]:
        return self._fetch([self._refs[index] for index in indices])

    def _result(self, result: ResultOf) -> Any:
        """Return a result as its caller would get it, or a shard of it."""
        with _decoding_parts(copied=result.gather.collect == "join" or result.shard is not None):
            outputs = self._values(result.parts)
        value = gather(result.gather, outputs)
        if result.shard is None:
            return value
        shard = join_rows([shard_of(value, result.shard)])
        self._check_rows(count_rows(shard))
        return shard

    def _check_rows(self, rows: int | None) -> None:
        """Check that a future has as many rows for this rank as earlier futures, if it has rows."""
        if rows is not None:
            check_rows(rows, self._rows)
            self._rows = rows

    def _shard(self, result: ResultOf, shard: Shard) -> Any:
        """Return rows of a result whose parts are stored on other ranks. Only overlapping parts are fetched."""
        infos: list[PartInfo] = self._values(result.infos)
        if only_settings(infos):
            return self._values([result.parts[0]])[0]
        picked = row_shard(result.gather, infos, shard)
        self._check_rows(padded_size(sum(len(rows) for _, rows in picked.rows), shard.pad_to_multiple))
        parts = [(result.parts[place], rows) for place, rows in picked.rows]
        found = _rows_of(parts, self._values, shard.pad_to_multiple, picked.order)
        received.nbytes -= sum(_unread_bytes(infos[place], len(rows)) for place, rows in picked.rows)
        return found


def joined_parts(
    parts: Sequence[tuple[Any, int, int, bool]],
    joined: bool,
    fetch: Fetch,
    pad_to_multiple: int | None = None,
) -> Any:
    """Return the rows of stored parts, joined, or the list of the parts.

    Args:
        parts: encoded bytes or reference of each part, its row range, and whether the range covers the whole part.
        joined: whether rows are joined.
        fetch: returns the values of references.
        pad_to_multiple: the result repeats rows or parts, so that their number is a multiple of this.
    """
    chosen = [(source, None if whole else range(start, stop)) for source, start, stop, whole in parts]
    if joined:
        return _rows_of(chosen, fetch, pad_to_multiple)
    return pad_rows([_rows_of([part], fetch) for part in chosen], pad_to_multiple)


def _rows_of(
    parts: Sequence[tuple[Any, Sequence[int] | None]],
    fetch: Fetch,
    pad_to_multiple: int | None = None,
    order: Sequence[int] | None = None,
) -> Any:
    """Return rows of parts, joined, in their ``order``. A join copies, so its parts may be views.

    ``parts`` are encoded bytes or a reference of each part, and its rows; None: all.
    """
    alone = len(parts) == 1 and order is None
    in_place = alone and (parts[0][1] is None or current_arrival().readonly)
    with _decoding_parts(copied=not in_place):
        references = [source for source, _ in parts if not isinstance(source, bytes)]
        fetched = iter(fetch(references) if references else ())
        values = [decode(source) if isinstance(source, bytes) else next(fetched) for source, _ in parts]
    taken = [
        value if rows is None else _take(value, rows) for value, (_, rows) in zip(values, parts, strict=True)
    ]
    found = taken[0] if in_place else join_rows(taken)
    return pad_rows(found if order is None else take_rows(found, order), pad_to_multiple)


def _decoding_parts(*, copied: bool) -> AbstractContextManager[None]:
    """Decode parts on the device of the call's arguments, as views if they are ``copied`` next."""
    arrival = current_arrival()
    return decoding(readonly=copied or arrival.readonly, device=arrival.device)


def _unread_bytes(info: PartInfo, rows_read: int) -> int:
    """Return the bytes of the rows of an output that are not read, as a proportion of all its bytes."""
    rows = info.rows or 1
    return info.nbytes * (rows - rows_read) // rows


def _take(part: Any, rows: Sequence[int]) -> Any:
    return slice_rows(part, rows.start, rows.stop) if isinstance(rows, range) else take_rows(part, rows)


def encoded(result: Any) -> Any:
    """Return an output as it is sent: small plain values as they are, others encoded."""
    return result if type(result) in ATOMS else encode(result)


def described(result: Any) -> tuple[PartInfo, Any]:
    """Return the description of an output, and the output as it is sent."""
    output = encoded(result)
    nbytes = sent_bytes(output)
    try:
        leaves, _ = flatten(result, "")
        return PartInfo(rows_of(leaves, ""), nbytes, settings_of(leaves)), output
    except DispatchError:
        # Leaves of different row counts: valid as a result, but not as the rows of another call.
        return PartInfo(-1, nbytes), output


def sent_bytes(output: Any) -> int:
    """Return the bytes of an output, or of a described output, as it is sent."""
    if isinstance(output, tuple):
        return output[0].nbytes
    if isinstance(output, bytes | str):
        return len(output)
    return getattr(output, "nbytes", 0)
