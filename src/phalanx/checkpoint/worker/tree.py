"""A state of dicts and lists as leaves by key, and back; digests of leaves."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.storage.tensor_index import Path
from phalanx.errors import CheckpointError
from phalanx.weights.planning.digests import tensor_digest

__all__ = ["key_of", "leaves", "nested", "value_digest"]


def leaves(state: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What lies in dicts, and in lists and tuples that have tensors; everything else is a leaf, empty dicts too.

    A dict of a kind of its own (``Counter``, ``defaultdict``) is a leaf where it has no tensors, and keeps its kind.
    """
    if _is_plain(state) and all(type(key) in (str, int) for key in state):
        for key, value in state.items():
            yield from leaves(value, (*at, key))
    elif type(state) in (list, tuple) and _has_tensors(state):
        kind = type(state).__name__
        for index, value in enumerate(state):
            yield from leaves(value, (*at, (kind, index)))
    else:
        yield at, state


def _is_plain(state: Any) -> TypeGuard[Mapping[Any, Any]]:
    if not isinstance(state, Mapping) or not state:
        return False
    return not isinstance(state, dict) or type(state) in (dict, OrderedDict) or _has_tensors(state)


def _has_tensors(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return True
    if isinstance(state, Mapping):
        return any(map(_has_tensors, state.values()))
    return type(state) in (list, tuple) and any(map(_has_tensors, state))


def key_of(path: Path) -> str:
    """A path as torch's distributed checkpoint writes it: ``optimizer.state.0.step``."""
    return ".".join(str(step[1]) if isinstance(step, tuple) else str(step) for step in path)


def keyed(found: Iterator[tuple[Path, Any]]) -> dict[str, tuple[Path, Any]]:
    """Leaves by key.

    Raises:
        CheckpointError: two of them have one key.
    """
    by_key: dict[str, tuple[Path, Any]] = {}
    for path, value in found:
        key = key_of(path)
        if key in by_key:
            raise CheckpointError(
                f"two values of the state are named {key}: {by_key[key][0]} and {path}; rename one of their keys"
            )
        by_key[key] = (path, value)
    return by_key


def nested(found: Mapping[Path, Any]) -> Any:
    """The state whose leaves these are."""
    if len(found) == 1 and () in found:
        return found[()]
    inner: dict[Any, dict[Path, Any]] = {}
    for path, value in found.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    built = {step: nested(one) for step, one in inner.items()}
    if built and all(isinstance(step, tuple) for step in built):
        values = [built[step] for step in sorted(built, key=lambda step: step[1])]
        return tuple(values) if next(iter(built))[0] == "tuple" else values
    return built


def value_digest(value: Any) -> str:
    """The same for values that are equal, whatever they share in memory; 16 hexadecimal digits."""
    from xxhash import xxh3_64  # loaded where something is saved: nothing else here needs it

    text: Any = xxh3_64()
    for block in _text(value):
        text.update(block)
    return text.hexdigest()


def _text(value: Any) -> Iterator[bytes]:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        if not value.is_meta:
            yield tensor_digest(value.detach(), verify="full")
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape}".encode()
        yield value.tobytes() if value.dtype != object else pickle.dumps(value)
    elif value is None or type(value) is bool:
        yield f"{value}".encode()
    elif type(value) is int:
        yield f"int {value:x}".encode()  # a number of many digits has no other text
    elif type(value) in (str, bytes):
        yield f"{type(value).__name__} {len(value)} ".encode()
        yield value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    elif type(value) is float:
        yield b"float " + struct.pack("<d", value)
    elif type(value) in (list, tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for one in value:
            yield from _text(one)
    elif isinstance(value, Mapping):
        yield f"{type(value).__name__} {len(value)}".encode()
        for key, one in value.items():
            yield from _text(key)
            yield from _text(one)
    elif type(value) in (set, frozenset):
        yield f"{type(value).__name__} {len(value)}".encode()
        yield from sorted(value_digest(one).encode() for one in value)
    else:
        yield pickle.dumps(value)
