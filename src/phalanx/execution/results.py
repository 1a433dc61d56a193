"""From what a worker method returns to what its process gives back."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.dispatch.split import row_ops, rows_of, settings_of, slice_rows
from phalanx.dispatch.structure import flatten
from phalanx.errors import DispatchError
from phalanx.wire.codec import Encoded
from phalanx.wire.codec import encode as encode_value
from phalanx.wire.lazy import is_tensor
from phalanx.wire.outputs import BackendRef, PartInfo

PLAIN = (type(None), bool, int, float, str, bytes)


def _itself(ref: BackendRef) -> BackendRef:
    return ref


_LEFT_TO_THE_BACKEND = {BackendRef: _itself}


def encode(result: Any) -> Encoded:
    """An output, with the references in it beside its head."""
    return encode_value(result, hoist=_LEFT_TO_THE_BACKEND)


def encoded(result: Any) -> Any:
    """An output as it travels: plain small things as they are, all else encoded."""
    return result if type(result) in PLAIN else encode(result)


def described(result: Any, *, halves: bool) -> tuple[Any, ...]:
    """What may be known of an output without fetching it, and the output.

    With ``halves``, two objects stand for the output: itself and None, or its first and its second half.
    """
    whole = encoded(result)
    info = _info(result, getattr(whole, "nbytes", 0))
    if not halves:
        return info, whole
    halved = info.halved()
    if halved is None or not _halves_are_rows(result):
        return info, whole, None
    middle = halved.first_rows or 0
    first, second = slice_rows(result, 0, middle), slice_rows(result, middle, halved.rows or 0)
    return halved, encode(first), encode(second)


def _info(result: Any, nbytes: int) -> PartInfo:
    try:
        leaves, _ = flatten(result, "")
        rows = rows_of(leaves, "")
    except DispatchError:  # leaves of different row counts: a fair result, only not the rows of another call
        return PartInfo(None, nbytes)
    return PartInfo(rows, nbytes, rows, settings_of(leaves))


def _halves_are_rows(result: Any) -> bool:
    """Whether the halves joined are what the output is: plain tensors and arrays, and nothing without rows."""
    leaves, _ = flatten(result, "")
    return all(row_ops(leaf) is not None and _is_plain(leaf.value) for leaf in leaves)


def _is_plain(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (is_tensor(value) and not value.requires_grad)
