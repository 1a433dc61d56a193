"""The ``.metadata`` by which torch's own distributed checkpoint reads what was saved, without this library."""

from __future__ import annotations

import pickle
from typing import Any

from phalanx.checkpoint.storage.tensor_index import Catalogue, Path, Piece

__all__ = ["METADATA", "torch_metadata"]

METADATA = ".metadata"


def torch_metadata(catalogue: Catalogue) -> bytes:
    """For ``torch.distributed.checkpoint.load`` and ``format_utils.dcp_to_torch_save``.

    A value that differs by rank is there once for each, with the rank in its name.
    """
    import torch  # loaded where something is saved: nothing else of the driver's needs it
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import (
        _StorageInfo,  # pyright: ignore[reportPrivateUsage]  # what its reader looks items up in
    )

    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, Any] = {}

    def put(key: str, piece: Piece, index: int | None) -> None:
        offset = None if piece.box is None else torch.Size(piece.box.offsets)
        places[metadata.MetadataIndex(key, offset, index)] = _StorageInfo(
            piece.file, piece.offset, piece.length
        )

    for key, one in catalogue.tensors.items():
        chunks = [
            metadata.ChunkStorageMetadata(torch.Size(piece.box.offsets), torch.Size(piece.box.sizes))
            for piece in one.pieces
            if piece.box is not None
        ]
        properties = metadata.TensorProperties(dtype=getattr(torch, one.dtype))
        entries[key] = metadata.TensorStorageMetadata(properties, torch.Size(one.shape), chunks)
        paths[key] = _bare(catalogue.paths[key])
        for index, piece in enumerate(one.pieces):
            put(key, piece, index)
    for key, value in catalogue.values.items():
        everyone = range(catalogue.world_size) if value.ranks is None else value.ranks
        for rank, piece in zip(everyone, value.pieces, strict=False):
            name = f"{key} of rank {rank}" if value.by_rank else key
            entries[name] = metadata.BytesStorageMetadata()
            path = _bare(catalogue.paths[key])
            paths[name] = (*path[:-1], f"{path[-1]} of rank {rank}") if value.by_rank and path else path
            put(name, piece, None)
    return pickle.dumps(metadata.Metadata(entries, paths, places))


def _bare(path: Path) -> tuple[str | int, ...]:
    return tuple(step[1] if isinstance(step, tuple) else step for step in path)
