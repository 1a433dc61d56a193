"""Planners for torch's distributed checkpoint (DCP), coordinated by the driver without a process group.

To save, each rank makes a plan of its leaves, and the driver merges the plans: each box is written once, and values
that differ by rank are written by each rank under a key of its own.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from xxhash import xxh3_64_hexdigest

from phalanx.display.text_format import first_of
from phalanx.errors import CheckpointError, CheckpointMismatch, PhalanxError
from phalanx.weights.boxes import cut
from phalanx.weights.digests import tensor_digest
from phalanx.worker.rank_state import LocalTensor, Path, StateLeaf
from phalanx.worker.state_copies import host_copy

_BY_NAME = ("model.", "optimizer.")
"""Leaves that a load finds by the names of parameters, on any rank."""


_Offer = tuple[Path, str | None]
"""Data of a leaf in a rank's plan for the driver: its path, and a digest unless it is a declared tensor."""


def rank_key(key: str, rank: int) -> str:
    """Return the key of a rank's value of a leaf that differs by rank."""
    return f"{key} of rank {rank}"


def value_digest(value: Any) -> str:
    """Return a digest to compare a value between ranks: equal for equal values, even if other parts share memory."""
    stream = io.BytesIO()
    pickler = _DigestPickler(stream, 5)
    pickler.fast = True  # without references to parts that occurred before
    try:
        pickler.dump(value)
    except ValueError:  # a part refers to itself
        stream = io.BytesIO()
        _DigestPickler(stream, 5).dump(value)
    return xxh3_64_hexdigest(stream.getbuffer())


class _DigestPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return str(obj.dtype), tuple(obj.shape), tensor_digest(obj.detach(), verify="full")
        if type(obj) in (set, frozenset):  # their order differs by process
            return type(obj).__name__, sorted(map(value_digest, obj))
        return None


class SavePlanner(dcp.DefaultSavePlanner):
    """The planner of a rank's save.

    Args:
        leaves: path and value (of tensors, a :class:`LocalTensor`) of each leaf by key.
        rank: index of the rank among the ranks that save.
        alone: True if no other rank saves: no digests are compared.
    """

    def __init__(self, leaves: Mapping[str, StateLeaf], rank: int, *, alone: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._leaves = dict(leaves)
        self.rank, self._alone = rank, alone
        self._staged: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}

    def create_local_plan(self) -> dcp.SavePlan:
        items: list[dcp.WriteItem] = []
        data: dict[str, _Offer] = {}
        for key, (path, value) in self._leaves.items():
            tensor = value if isinstance(value, LocalTensor) else None
            if tensor is None:
                items.append(dcp.WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            else:
                items += _write_items(key, tensor)
            digest = None
            if not self._alone and (tensor is None or not tensor.declared):
                with pickling(key, value):
                    digest = value_digest(value if tensor is None else tensor.local)
            data[key] = (path, digest)
        return dcp.SavePlan(items, planner_data=data)

    def stage(self, plan: dcp.SavePlan, buffers: dict[Any, torch.Tensor]) -> None:
        """Copy the items of the merged plan into host memory. ``buffers`` are reused by the next save."""
        for item in plan.items:
            data = self.resolve_data(item)
            if isinstance(data, torch.Tensor):
                data = buffers[item.index] = host_copy(data, buffers.get(item.index))
            self._staged[item.index] = data
        for index in buffers.keys() - self._staged.keys():
            del buffers[index]
        self._leaves = {}

    def resolve_data(self, write_item: dcp.WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if index in self._staged:
            return self._staged[index]
        key = index.fqn if index.fqn in self._leaves else index.fqn.removesuffix(rank_key("", self.rank))
        value = self._leaves[key][1]
        if isinstance(value, LocalTensor):
            return value.box_at(index.offset or ()).contiguous()
        stream = io.BytesIO()
        with pickling(key, value):
            torch.save(value, stream)
        return stream


def _write_items(key: str, tensor: LocalTensor) -> Iterator[dcp.WriteItem]:
    tensor.check(key)
    for chunk in _chunks(tensor):
        data = TensorWriteData(chunk, TensorProperties(dtype=tensor.local.dtype), torch.Size(tensor.shape))
        yield dcp.WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunks(tensor: LocalTensor) -> list[dcp.ChunkStorageMetadata]:
    boxes = [patch.box for patch in tensor.patches]
    return [dcp.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


@contextmanager
def pickling(key: str, value: Any) -> Generator[None]:
    """Convert errors of the block to errors that name the value."""
    try:
        yield
    except (PhalanxError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{key} of the state, a {type(value).__qualname__}, cannot be pickled: {error}; leave it out of the state, "
            "or save its parts instead"
        ) from error


def merge_plans(
    plans: Sequence[dcp.SavePlan], *, model: bool = False
) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
    """Merge the plans of all ranks on the driver. Return each rank's part, and the metadata of the files.

    With ``model``, all leaves are those of a model, and are found by their names on any rank.

    Raises:
        CheckpointError: if ranks contradict each other, or together hold only a part of a tensor.
    """
    offers: dict[str, dict[int, _Offer]] = {}
    for rank, plan in enumerate(plans):
        for key, offer in plan.planner_data.items():
            offers.setdefault(key, {})[rank] = offer
    by_rank = {key for key, by in offers.items() if _is_by_rank(key, by, len(plans), model)}
    paths: dict[str, Path] = {}
    for key, by in offers.items():
        for rank, (path, _) in by.items():
            name, last = (rank_key(key, rank), (f"of rank {rank}",)) if key in by_rank else (key, ())
            paths[name] = (*path, *last)
    renamed = [
        dcp.SavePlan([_renamed(item, rank) if item.index.fqn in by_rank else item for item in plan.items])
        for rank, plan in enumerate(plans)
    ]
    _check_tensors(renamed)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        merged, metadata = planner.create_global_plan(renamed)
    except ValueError as error:
        raise CheckpointError(
            f"boxes of the ranks overlap: {error}; declare boxes that are equal or disjoint"
        ) from error
    return merged, dataclasses.replace(metadata, planner_data=paths)


def _renamed(item: dcp.WriteItem, rank: int) -> dcp.WriteItem:
    return dataclasses.replace(item, index=MetadataIndex(rank_key(item.index.fqn, rank), item.index.offset))


def _is_by_rank(key: str, offers: Mapping[int, _Offer], ranks: int, model: bool) -> bool:
    """Return whether a leaf differs by rank, or only some ranks have it and it is not found by its name."""
    digests = {rank: digest for rank, (_, digest) in offers.items()}
    declared = [rank for rank, digest in digests.items() if digest is None]
    if len(declared) == len(digests):
        return False
    if declared:
        raise CheckpointError(
            f"{key} is a sharded tensor on ranks {first_of(declared)} and something else on ranks "
            f"{first_of(sorted(digests.keys() - declared))}; give each its own name"
        )
    return len(set(digests.values())) > 1 or (
        len(digests) < ranks and not model and not key.startswith(_BY_NAME)
    )


def _check_tensors(plans: Sequence[dcp.SavePlan]) -> None:
    """Check that ranks mean the same global tensor, and that their boxes cover it. DCP takes the first size."""
    first: dict[str, tuple[str, int]] = {}
    sizes: dict[str, torch.Size] = {}
    boxes: dict[str, dict[torch.Size, torch.Size]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key, data = item.index.fqn, item.tensor_data
            if data is None:
                continue
            sizes[key] = data.size
            form = f"{str(data.properties.dtype).removeprefix('torch.')} {list(data.size)}"
            other, owner = first.setdefault(key, (form, rank))
            if other != form:
                raise CheckpointError(
                    f"{key} is {other} on rank {owner} and {form} on rank {rank}; all ranks must save "
                    "the same global tensor"
                )
            if boxes.setdefault(key, {}).setdefault(data.chunk.offsets, data.chunk.sizes) != data.chunk.sizes:
                raise CheckpointError(f"boxes of {key} overlap; declare boxes that are equal or disjoint")
    for key, found in boxes.items():
        covered, volume = sum(map(math.prod, found.values())), math.prod(sizes[key])
        if covered != volume:
            raise CheckpointError(
                f"the ranks hold {covered} of the {volume} elements of {key} {list(sizes[key])}: the declared boxes, "
                "or Megatron's ranks, are wrong, or ranks are missing here"
            )


class LoadPlanner(dcp.LoadPlanner):
    """The planner of a rank's load, which fills tensors and keeps values.

    Args:
        metadata: metadata of the files.
        targets: tensors to fill, or None for values to read, by key in the files.

    Attributes:
        plan: the items to read.
        values: values that were read, by key.
    """

    def __init__(self, metadata: dcp.Metadata, targets: Mapping[str, LocalTensor | None]) -> None:
        self.metadata = metadata
        self._targets: Mapping[str, Any] = targets
        self.values: dict[str, Any] = {}
        self.plan = self.create_local_plan()

    def create_local_plan(self) -> dcp.LoadPlan:
        return dcp.LoadPlan(
            [item for key, target in self._targets.items() for item in self._items(key, target)]
        )

    def _items(self, key: str, target: LocalTensor | None) -> list[dcp.ReadItem]:
        stored = self.metadata.state_dict_metadata[key]
        if target is None or not isinstance(stored, dcp.TensorStorageMetadata):
            index, none = MetadataIndex(key), torch.Size([0])
            return [dcp.ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)]
        chunks = _chunks(target)
        items = create_read_items_for_chunk_list(key, stored, chunks)
        if sum(item.lengths.numel() for item in items) != sum(chunk.sizes.numel() for chunk in chunks):
            raise CheckpointMismatch(f"of {key}, boxes that this rank holds were not saved")
        return items

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        found = torch.load(value, weights_only=False, map_location="cpu")
        target = self._targets[key]
        if target is None:
            self.values[key] = found
        elif found.shape != target.local.shape:  # format 1 pickles tensors that differ by rank
            raise CheckpointMismatch(f"{key} was saved with shape {list(found.shape)}")
        else:
            target.local.copy_(found)

    def resolve_tensor(self, read_item: dcp.ReadItem) -> torch.Tensor:
        box = self._targets[read_item.dest_index.fqn].box_at(read_item.dest_index.offset or ())
        return cut(box, read_item.dest_offsets, read_item.lengths)
