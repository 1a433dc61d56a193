"""Digests by which ranks compare values: equal for equal values, whatever memory their parts share."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

from phalanx.weights.digests import tensor_digest


def value_digest(value: Any) -> str:
    """Return the digest of a value, 16 hexadecimal digits."""
    found = xxh3_64()
    for block in _blocks(value):
        found.update(block)
    return found.hexdigest()


def _blocks(value: Any) -> Iterator[bytes]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        yield tensor_digest(value.detach(), verify="full")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif value is None or kind is bool:
        yield f"{value}".encode()
    elif kind is int:
        yield f"int {value:x}".encode()  # decimal digits are limited
    elif kind is float:
        yield b"float " + struct.pack("<d", value)
    elif kind in (str, bytes):
        yield f"{kind.__name__} {len(value)} ".encode()
        yield bytes(value) if kind is bytes else str(value).encode("utf-8", "surrogatepass")
    elif kind in (list, tuple) or isinstance(value, Mapping):
        yield f"{kind.__name__} {len(value)}".encode()
        parts = value.items() if isinstance(value, Mapping) else value
        for part in parts:
            yield from (
                block for item in (part if isinstance(value, Mapping) else (part,)) for block in _blocks(item)
            )
    elif kind in (set, frozenset):
        yield f"{kind.__name__} {len(value)}".encode()
        yield from sorted(value_digest(item).encode() for item in value)
    else:
        yield pickle.dumps(value)
