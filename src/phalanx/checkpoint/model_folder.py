"""A model as a folder in Hugging Face's format: its layout, and a rank's part of writing and reading it.

The format: 8 bytes with the length of a header, the header in JSON, then the elements of each tensor, row-major
(https://github.com/huggingface/safetensors). Several ranks write a file. The writer of torch's distributed
checkpoint is not used: with two boxes of a tensor on a rank it writes wrong files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from phalanx.checkpoint.storage import Storage, storage_errors
from phalanx.checkpoint.stored_state import StoredState, stored_leaf
from phalanx.errors import CheckpointCorrupted, CheckpointError

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

    def elements(self, folder: str, mode: Any, offsets: Sequence[int], sizes: Sequence[int]) -> Any:
        """Return a box of the tensor as bytes that are mapped to the file; the last dimension is an element."""
        shape = (*self.shape, self.dtype.itemsize)
        file: Any = np.memmap(f"{folder}/{self.relative_path}", np.uint8, mode, self.start, shape)
        return file[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


def create_files(
    folder: FilePath, tensors: Mapping[str, dcp.TensorStorageMetadata], shard_bytes: int
) -> dict[str, Place]:
    """Create a folder of files of at most ``shard_bytes``; a larger tensor has its own file. Return the places.

    Files are created at full size: on a full disk, a write to a mapped file would kill the rank (SIGBUS).

    Raises:
        CheckpointError: if the format does not have the type of a tensor.
    """
    files: list[dict[str, Any]] = [{}]
    ends = [0]
    for name, tensor in sorted(tensors.items()):
        dtype, nbytes = tensor.properties.dtype, tensor.size.numel() * tensor.properties.dtype.itemsize
        if dtype not in _TYPES:
            types = ", ".join(map(str, _TYPES))
            raise CheckpointError(f"{name} has type {dtype}; safetensors files have {types}")
        if files[-1] and ends[-1] + nbytes > shard_bytes:
            files.append({})
            ends.append(0)
        start, ends[-1] = ends[-1], ends[-1] + nbytes
        shape = list(tensor.size)
        files[-1][name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [start, ends[-1]]}
    folder.mkdir(parents=True)
    places: dict[str, Place] = {}
    for number, (content, end) in enumerate(zip(files, ends, strict=True), 1):
        several = f"model-{number:05}-of-{len(files):05}.safetensors"
        file = several if len(files) > 1 else "model.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}, **content}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        with open(folder / file, "wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, len(header) + end)
            opened.write(header)
        places |= _places(file, content, len(header))
    if len(files) > 1:
        weights = {name: place.relative_path for name, place in places.items()}
        index = {"metadata": {"total_size": sum(ends)}, "weight_map": weights}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return places


def _places(file: str, content: Mapping[str, Any], start: int) -> dict[str, Place]:
    """Return the places of the tensors of a header."""
    return {
        name: Place(file, start + one["data_offsets"][0], _NAMES[one["dtype"]], tuple(one["shape"]))
        for name, one in content.items()
        if name != "__metadata__"
    }


def write_boxes(
    folder: str, plan: dcp.SavePlan, planner: dcp.SavePlanner, places: Mapping[str, Place]
) -> int:
    """Write the items of a rank's plan into files of :func:`create_files`. Return the bytes written.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    written = 0
    with storage_errors(folder, "written"):
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if data.numel():
                raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                box = places[item.index.fqn].elements(folder, "r+", item.index.offset or (), data.shape)
                box[...] = raw.reshape(*data.shape, -1)
                box.flush()
                written += raw.size
    return written


def read_model(folder: str) -> StoredState:
    """Read the state of a model from the headers of a folder's files.

    Raises:
        CheckpointCorrupted: if a file is missing, or is not a safetensors file.
        CheckpointError: if there are no files.
    """
    files = _model_files(folder)
    with storage_errors(folder, "read"):
        places = {name: place for file in files for name, place in _read_header(folder, file).items()}
    if not files:
        raise CheckpointError(f"{folder} has no safetensors files; give the folder of a model")
    metadata = dcp.Metadata({}, storage_data={})
    for name, place in places.items():
        size, origin = torch.Size(place.shape), torch.Size([0] * len(place.shape))
        chunks = [dcp.ChunkStorageMetadata(origin, size)]
        properties = TensorProperties(dtype=place.dtype)
        metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, size, chunks)
        metadata.storage_data[MetadataIndex(name, origin)] = place
    leaves = {name: stored_leaf(metadata, name, (name,)) for name in places}
    return StoredState(metadata, leaves, 1, folder, read_boxes)


def _model_files(folder: str) -> list[str]:
    """Return the files of the model, chosen as by transformers: the folder may have other files in another layout."""
    found = [name for name in Storage(folder).names() if name.endswith(".safetensors")]
    index = Storage(folder).read(INDEX)
    if "model.safetensors" in found or index is None:
        return [name for name in found if name == "model.safetensors"] or found
    try:
        named = {str(name) for name in json.loads(index)["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointCorrupted(f"{folder}/{INDEX} is damaged", files=(f"{folder}/{INDEX}",)) from None
    if missing := sorted(named.difference(found)):
        raise CheckpointCorrupted(
            f"{folder} lacks {missing[0]}, which {INDEX} names; fetch the folder again",
            files=tuple(f"{folder}/{name}" for name in missing),
        )
    return sorted(named)


def _read_header(folder: str, name: str) -> dict[str, Place]:
    path = f"{folder}/{name}"
    try:
        with open(path, "rb") as file:
            length, size = int.from_bytes(file.read(8), "little"), os.stat(path).st_size
            if length > size - 8:
                raise ValueError(length)
            places = _places(name, json.loads(file.read(length)), 8 + length)
            if any(one.start + math.prod(one.shape) * one.dtype.itemsize > size for one in places.values()):
                raise ValueError(size)
            return places
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointCorrupted(
            f"{path} is damaged: it has no valid safetensors header, or is truncated", files=(path,)
        ) from None


def read_boxes(folder: str, metadata: dcp.Metadata, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> None:
    """Read the items of a rank's plan from safetensors files."""
    for item in plan.items:
        place: Place = metadata.storage_data[item.storage_index]
        target = planner.resolve_tensor(item)
        if target.numel():
            raw = np.ascontiguousarray(place.elements(folder, "c", item.storage_offsets, item.lengths))
            target.copy_(torch.from_numpy(raw).reshape(-1).view(place.dtype).view(target.shape))
