"""A model as a folder of safetensors files, in the layout that transformers writes and reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from phalanx.checkpoint.planners import LoadPlanner
from phalanx.checkpoint.storage import Storage, fsync, storage_errors
from phalanx.checkpoint.stored_state import StoredState, stored_leaf
from phalanx.errors import CheckpointCorrupted, CheckpointError
from phalanx.weights.boxes import cut
from phalanx.worker.rank_state import LocalTensor, SavedLeaf

INDEX = "model.safetensors.index.json"
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")


def split_model(tensors: Mapping[str, SavedLeaf], shard_bytes: int) -> dict[str, list[str]]:
    """Return the tensors of each file. Files have at most ``shard_bytes``; a larger tensor has its own file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, leaf in sorted(tensors.items()):
        nbytes = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").nbytes
        if groups[-1] and filled + nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{number:05}-of-{count:05}.safetensors": names for number, names in enumerate(groups, 1)}


def write_index(folder: str, files: Mapping[str, Sequence[str]], nbytes: int) -> None:
    """Write the index of a model in several files, with the ``nbytes`` of all tensors."""
    places = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {"total_size": nbytes}, "weight_map": places}, indent=2)
    Storage(folder).write(INDEX, text.encode())


def write_file(path: str, names: Sequence[str], stored: StoredState) -> int:
    """Write a file with these tensors of a saved state. Return their bytes.

    Raises:
        CheckpointError: if the file cannot be written, or the format does not have the type of a tensor.
    """
    leaves = ((name, stored.leaves[name]) for name in names)
    tensors = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for name, leaf in leaves}
    planner = LoadPlanner(stored.metadata, {name: LocalTensor.of(name, one) for name, one in tensors.items()})
    with storage_errors(path, "written"):
        stored.read(stored.where, planner)
        with open(path, "wb") as file:
            mode = os.fstat(file.fileno()).st_mode
        try:
            save_file(tensors, path, {"format": "pt"})
        except KeyError as error:
            wrong = next(name for name, one in tensors.items() if one.dtype == error.args[0])
            raise CheckpointError(f"{wrong} has type {error}, which safetensors files do not have") from None
        except SafetensorError as error:
            number = _SYSTEM_ERROR.search(str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), str(error)) from None
        os.chmod(path, mode)  # safetensors lets only this user read the file
        fsync(path)
    return sum(one.nbytes for one in tensors.values())


def read_model(folder: str) -> StoredState:
    """Read the state of a model from the headers of a folder's files.

    Raises:
        CheckpointCorrupted: if a file is missing, or is not a safetensors file.
        CheckpointError: if there are no files.
    """
    files = _model_files(folder)
    if not files:
        raise CheckpointError(f"{folder} has no safetensors files; give the folder of a model")
    metadata = dcp.Metadata({}, storage_data={})
    for file in files:
        for name, tensor in _tensors(f"{folder}/{file}").items():
            origin = torch.Size([0] * tensor.dim())
            chunks = [dcp.ChunkStorageMetadata(origin, tensor.shape)]
            properties = TensorProperties(dtype=tensor.dtype)
            metadata.state_dict_metadata[name] = dcp.TensorStorageMetadata(properties, tensor.shape, chunks)
            metadata.storage_data[MetadataIndex(name, origin)] = SimpleNamespace(relative_path=file)
    leaves = {name: stored_leaf(metadata, name, (name,)) for name in metadata.state_dict_metadata}
    return StoredState(metadata, leaves, 1, folder, read_boxes)


def _tensors(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, which are mapped to it and read once they are used."""
    with storage_errors(path, "read"):
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        except SafetensorError:
            raise CheckpointCorrupted(
                f"{path} is damaged: it has no valid safetensors header, or is truncated", files=(path,)
            ) from None


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


def read_boxes(folder: str, planner: LoadPlanner) -> None:
    """Read the items of a rank's plan from safetensors files."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for item in planner.plan.items:
        name = planner.metadata.storage_data[item.storage_index].relative_path
        if name not in files:
            files[name] = _tensors(f"{folder}/{name}")
        tensor = files[name][item.storage_index.fqn]
        planner.resolve_tensor(item).copy_(cut(tensor, item.storage_offsets, item.lengths))
