"""A folder as Hugging Face keeps models: safetensors files, sharded by size, and an index. Layout only. Pure.

The format: 8 bytes with the length of a header, the header in JSON, then the elements of each tensor, row-major
(https://github.com/huggingface/safetensors). As a header says where each element lies, several ranks can write
one file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.checkpoint.storage.tensor_index import Catalogue, Path, Piece, StoredTensor
from phalanx.errors import CheckpointCorrupted, CheckpointError
from phalanx.weights.planning.boxes import Box, whole
from phalanx.weights.planning.shard_manifest import DTYPE_BYTES

__all__ = ["INDEX", "Place", "Shards", "plan_shards", "runs", "stored_in"]

INDEX = "model.safetensors.index.json"
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {short: name for name, short in _TYPES.items()}


class Place(NamedTuple):
    """Where a tensor lies: file, first byte in it, type and shape."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """A folder to be written: headers and sizes of files, and where each tensor goes."""

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    places: Mapping[str, Place]

    def index(self) -> bytes:
        """The index file."""
        total = sum(self.sizes.values()) - sum(map(len, self.headers.values()))
        weights = {name: place.file for name, place in sorted(self.places.items())}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode()


def plan_shards(tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_bytes: int) -> Shards:
    """Put tensors, given as type and shape by name, into files of at most ``shard_bytes``, in order of their names.

    A tensor that is larger has a file of its own.

    Raises:
        CheckpointError: the format has no such type.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        nbytes = _nbytes(name, *tensors[name])
        if files[-1] and filled + nbytes > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    headers: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    places: dict[str, Place] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        header = _header({name: tensors[name] for name in names})
        at = len(header)
        for name in names:
            dtype, shape = tensors[name]
            places[name] = Place(file, at, dtype, shape)
            at += _nbytes(name, dtype, shape)
        headers[file], sizes[file] = header, at
    return Shards(headers, sizes, places)


def _nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in _TYPES:
        raise CheckpointError(f"{name} has type {dtype}; safetensors files have {', '.join(_TYPES)}")
    return math.prod(shape) * DTYPE_BYTES[dtype]


def _header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + _nbytes(name, dtype, shape)
        content[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def stored_in(headers: Mapping[str, bytes], prefix: Path = ()) -> Catalogue:
    """The catalogue of a folder, by the headers of its files (with their 8 bytes of length).

    Raises:
        CheckpointCorrupted: a header is none.
    """
    tensors: dict[str, StoredTensor] = {}
    paths: dict[str, Path] = {}
    for file, header in headers.items():
        try:
            content = json.loads(header[8:])
            content.pop("__metadata__", None)
            for name, one in content.items():
                dtype, shape = _NAMES[one["dtype"]], tuple(one["shape"])
                begin, end = one["data_offsets"]
                at = len(header) + begin
                piece = Piece(file, at, end - begin, at, "", whole(shape))
                key = ".".join((*map(str, prefix), name))
                tensors[key], paths[key] = StoredTensor(dtype, shape, (piece,)), (*prefix, name)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointCorrupted(
                f"{file} is damaged: its header is none of safetensors", files=(file,)
            ) from None
    return Catalogue(1, tensors, {}, paths)


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The stretches of consecutive elements that ``box`` is of a row-major tensor: (first, count), in order."""
    dim = len(shape)
    while dim and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    inner = math.prod(shape[dim:])
    if dim == 0:
        yield 0, inner
        return
    length = box.sizes[dim - 1] * inner
    strides = [math.prod(shape[index + 1 :]) for index in range(dim)]
    last = box.offsets[dim - 1] * strides[dim - 1]
    yield from ((start + last, length) for start in _starts(box, strides, dim - 1))


def _starts(box: Box, strides: list[int], dims: int) -> Iterator[int]:
    starts = [0]
    for dim in range(dims):
        starts = [
            start + (box.offsets[dim] + index) * strides[dim]
            for start in starts
            for index in range(box.sizes[dim])
        ]
    yield from starts
