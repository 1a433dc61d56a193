"""Which parts of what was saved a rank reads, and where they go. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.checkpoint.storage.tensor_index import Catalogue, Piece, StoredTensor
from phalanx.errors import CheckpointMismatch
from phalanx.weights.planning.boxes import meet
from phalanx.weights.planning.shard_manifest import Held

__all__ = ["Fetch", "check_forms", "check_values", "fetches", "keys_for", "nbytes_of", "selected"]


class Fetch(NamedTuple):
    """A piece and what becomes of it: from ``source`` on in the piece, ``sizes`` long, to ``target`` in the tensor."""

    key: str
    piece: Piece
    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]


def selected(catalogue: Catalogue, parts: Sequence[str] | None, where: str) -> Catalogue:
    """Only what belongs to ``parts``, the outermost keys; None: everything.

    Raises:
        CheckpointMismatch: there is no such part.
    """
    if parts is None:
        return catalogue
    unknown = sorted(set(parts) - set(catalogue.parts()))
    if unknown:
        raise CheckpointMismatch(f"{where} has no part {unknown[0]!r}; it has {', '.join(catalogue.parts())}")
    kept = {key: path for key, path in catalogue.paths.items() if path and str(path[0]) in parts}
    tensors = {key: one for key, one in catalogue.tensors.items() if key in kept}
    values = {key: one for key, one in catalogue.values.items() if key in kept}
    return Catalogue(catalogue.world_size, tensors, values, kept)


def keys_for(catalogue: Catalogue, rank: int, world_size: int) -> set[str]:
    """What concerns a rank of ``world_size``, as far as the catalogue can say.

    What all ranks had concerns all; what some had, the same ones where there are as many ranks.
    """
    same = catalogue.world_size == world_size
    ranks = {key: one.ranks for key, one in catalogue.tensors.items()}
    ranks |= {key: one.ranks for key, one in catalogue.values.items()}
    return {key for key, on in ranks.items() if on is None or (same and rank in on)}


def check_values(catalogue: Catalogue, world_size: int) -> None:
    """See to it that no value differs by rank, where there are other ranks.

    Raises:
        CheckpointMismatch: some do, with their names.
    """
    if catalogue.world_size == world_size:
        return
    differing = sorted(key for key, one in catalogue.values.items() if one.by_rank)
    if differing:
        parts = sorted({str(catalogue.paths[key][0]) for key in differing if catalogue.paths[key]})
        rest = [part for part in catalogue.parts() if part not in (*parts, "rng")]
        advice = f"load the parts without them (parts={rest!r}), or " if rest else ""
        raise CheckpointMismatch(
            f"{len(differing)} values differed by rank on the {catalogue.world_size} ranks that saved, and nothing "
            f"says what they are on {world_size}: {_some(differing)}; {advice}tell how tensors are sharded "
            "(DTensor, px.register_state(boxes=...)), or load on as many ranks"
        )


def check_forms(catalogue: Catalogue, wanted: Mapping[str, Held]) -> None:
    """See to it that each tensor wanted was saved, with this type and global shape.

    Raises:
        CheckpointMismatch: with the names.
    """
    missing = sorted(wanted.keys() - catalogue.tensors.keys())
    if missing:
        by_rank = [key for key in missing if key in catalogue.values]
        if by_rank:
            raise CheckpointMismatch(
                f"{_some(by_rank)}: saved as values by rank, and here as sharded tensors; load into the layout that "
                "saved them, or register there how they are sharded and save again"
            )
        raise CheckpointMismatch(
            f"{len(missing)} tensors were not saved: {_some(missing)}; what was saved has, for one, "
            f"{next(iter(sorted(catalogue.tensors)), 'none')}"
        )
    odd = [
        f"{key} was saved as {saved.dtype} {list(saved.shape)} and is {held.dtype} {list(held.shape)} here"
        for key, held in wanted.items()
        if ((saved := catalogue.tensors[key]).dtype, tuple(saved.shape)) != (held.dtype, tuple(held.shape))
    ]
    if odd:
        raise CheckpointMismatch(f"{len(odd)} tensors are of another form: {'; '.join(odd[:5])}")


def fetches(catalogue: Catalogue, wanted: Mapping[str, Held]) -> list[Fetch]:
    """The reads that fill the boxes of ``wanted``, by file and offset. Forms were checked before."""
    found = [one for key, held in wanted.items() for one in _of(key, catalogue.tensors[key], held)]
    return sorted(found, key=lambda one: (one.piece.file, one.piece.offset))


def nbytes_of(wanted: Sequence[Fetch]) -> int:
    """Bytes of the pieces that are read, each once."""
    return sum({one.piece: one.piece.length for one in wanted}.values())


def _of(key: str, stored: StoredTensor, held: Held) -> list[Fetch]:
    found: list[Fetch] = []
    for patch in held.patches:
        for piece in stored.pieces:
            box = piece.box
            shared = None if box is None else meet(box, patch.box)
            if box is None or shared is None:
                continue
            source = tuple(s - b for s, b in zip(shared.offsets, box.offsets, strict=True))
            target = tuple(
                a + s - b for a, s, b in zip(patch.at, shared.offsets, patch.box.offsets, strict=True)
            )
            found.append(Fetch(key, piece, source, target, shared.sizes))
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
