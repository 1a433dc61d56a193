"""A model as a folder in Hugging Face's format: its layout, and a rank's part of writing and reading it.

The format: 8 bytes with the length of a header, the header in JSON, then the elements of each tensor, row-major
(https://github.com/huggingface/safetensors). Several ranks write a file. The writer of torch's distributed
checkpoint is not used: with two boxes of a tensor on a rank it writes wrong files.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.futures import Future

from phalanx.checkpoint.storage import storage_errors
from phalanx.checkpoint.stored_keys import StoredKey, StoredState
from phalanx.errors import CheckpointCorrupted, CheckpointError
from phalanx.worker.rank_state import Path

INDEX = "model.safetensors.index.json"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_NAMES = {name: dtype for dtype, name in _TYPES.items()}


class Place(NamedTuple):
    """Place of a tensor: file, first byte, type and shape."""

    relative_path: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """Headers and sizes of the files, and the place of each tensor, by name."""

    headers: dict[str, bytes]
    sizes: dict[str, int]
    places: dict[str, Place]

    def index_file(self) -> bytes:
        """Return the content of the index file."""
        total = sum(self.sizes.values()) - sum(map(len, self.headers.values()))
        weights = {name: place.relative_path for name, place in sorted(self.places.items())}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2).encode()


def plan_layout(tensors: Mapping[str, TensorStorageMetadata], shard_bytes: int) -> Layout:
    """Put tensors into files of at most ``shard_bytes``, in the order of their names. A larger tensor has its own file.

    Raises:
        CheckpointError: if the format lacks a type.
    """
    files: list[list[str]] = [[]]
    filled = 0
    for name in sorted(tensors):
        nbytes = _nbytes(name, tensors[name])
        if files[-1] and filled + nbytes > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += nbytes
    layout = Layout({}, {}, {})
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        _add_file(layout, file, {name: tensors[name] for name in names})
    return layout


def _add_file(layout: Layout, file: str, tensors: Mapping[str, TensorStorageMetadata]) -> None:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + _nbytes(name, tensor)]
        content[name] = {
            "dtype": _TYPES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "data_offsets": offsets,
        }
        at = offsets[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    layout.headers[file], layout.sizes[file] = header, len(header) + at
    for name, tensor in tensors.items():
        start = len(header) + content[name]["data_offsets"][0]
        layout.places[name] = Place(file, start, tensor.properties.dtype, tuple(tensor.size))


def _nbytes(name: str, tensor: TensorStorageMetadata) -> int:
    dtype = tensor.properties.dtype
    if dtype not in _TYPES:
        raise CheckpointError(
            f"{name} has type {dtype}; safetensors files have {', '.join(map(str, _TYPES))}"
        )
    return math.prod(tensor.size) * dtype.itemsize


def write_boxes(folder: str, plan: SavePlan, planner: SavePlanner, places: Mapping[str, Place]) -> int:
    """Write the items of a rank's plan into files that exist in their size. Return the bytes.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    written = 0
    with storage_errors(folder, "written"):
        for item in plan.items:
            data, place = planner.resolve_data(item), places[item.index.fqn]
            if isinstance(data, torch.Tensor) and data.numel():
                raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                shape = (*place.shape, place.dtype.itemsize)
                file: Any = np.memmap(f"{folder}/{place.relative_path}", np.uint8, "r+", place.start, shape)
                box = zip(item.index.offset or (), data.shape, strict=True)
                file[tuple(slice(start, start + size) for start, size in box)] = raw.reshape(*data.shape, -1)
                file.flush()
                written += raw.size
    return written


def save_config(model: Any, folder: str) -> None:
    """Write the configuration of a model of transformers."""
    save: Any = getattr(getattr(model, "config", None), "save_pretrained", None)
    if callable(save):
        save(folder)


def read_model(folder: str, prefix: Path) -> StoredState:
    """Read the headers of a folder; ``prefix`` is the place of the model in the state.

    Raises:
        CheckpointCorrupted: if a file is none of safetensors.
        CheckpointError: if there are no files.
    """
    with storage_errors(folder, "read"):
        files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
        tensors = {name: place for file in files for name, place in _places(folder, file).items()}
    if not files:
        raise CheckpointError(f"{folder} has no safetensors files")
    entries: dict[str, Any] = {name: _entry(place) for name, place in tensors.items()}
    data = {MetadataIndex(name, torch.Size([0] * len(place.shape))): place for name, place in tensors.items()}
    keys = {name: StoredKey(".".join((*map(str, prefix), name)), (*prefix, name)) for name in tensors}
    return StoredState(Metadata(entries, storage_data=data), keys, 1, folder)


def _entry(place: Place) -> TensorStorageMetadata:
    size = torch.Size(place.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=place.dtype), size, [chunk])


def _places(folder: str, name: str) -> dict[str, Place]:
    path = f"{folder}/{name}"
    try:
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            if length > os.stat(path).st_size - 8:
                raise ValueError(length)
            content = json.loads(file.read(length))
        content.pop("__metadata__", None)
        return {
            key: Place(name, 8 + length + one["data_offsets"][0], _NAMES[one["dtype"]], tuple(one["shape"]))
            for key, one in content.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise CheckpointCorrupted(
            f"{path} is damaged: its header is none of safetensors", files=(path,)
        ) from None


class ModelReader(FileSystemReader):
    """Reads boxes of tensors from safetensors files."""

    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self.set_up_storage_reader(metadata, is_coordinator=False)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place: Place = self.storage_data[item.storage_index]
            target = planner.resolve_tensor(item)
            if target.numel():
                shape = (*place.shape, place.dtype.itemsize)
                file: Any = np.memmap(f"{self.path}/{place.relative_path}", np.uint8, "c", place.start, shape)
                offsets = zip(item.storage_offsets, item.lengths, strict=True)
                raw = np.ascontiguousarray(file[tuple(slice(start, start + size) for start, size in offsets)])
                target.copy_(torch.from_numpy(raw).reshape(-1).view(place.dtype).view(target.shape))
        done: Future[None] = Future()
        done.set_result(None)
        return done
