"""From what a worker method returns to what its process gives back."""

from __future__ import annotations

from typing import Any

from phalanx.dispatch.pytree import flatten
from phalanx.dispatch.split import rows_of, settings_of
from phalanx.errors import DispatchError
from phalanx.wire.codec import Encoded
from phalanx.wire.codec import encode as encode_value
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


def described(result: Any) -> tuple[PartInfo, Any]:
    """Return the description of an output, and the output as it travels."""
    output = encoded(result)
    return _info(result, getattr(output, "nbytes", 0)), output


def _info(result: Any, nbytes: int) -> PartInfo:
    try:
        leaves, _ = flatten(result, "")
        rows = rows_of(leaves, "")
    except DispatchError:  # leaves of different row counts: a fair result, only not the rows of another call
        return PartInfo(None, nbytes)
    return PartInfo(rows, nbytes, settings_of(leaves))
